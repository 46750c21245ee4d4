"""When is it durable?"""
