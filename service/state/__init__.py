"""The state of a slot as bytes. Knows neither llama.cpp nor gRPC; it reads and writes a layout and does no I/O.

`image` holds the whole, `reader` takes it in pieces, `payload` finds its way through what llama.cpp wrote.
"""
