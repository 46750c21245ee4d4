"""Where are the source bytes?"""
