"""How does it get to the Hub, on a small disk, whole or not at all?"""
