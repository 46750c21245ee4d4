"""How fast is it here, and how far from what the machine can do?"""
