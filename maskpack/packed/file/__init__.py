"""The file form of a packed batch, a legal safetensors file: docs/format.md is its definition.

container.py   the buffer: header, arrays, checksum   codec.py  compression of the buffer
write.py       a packed batch as a header             read.py   a header as a packed batch; nothing in it is trusted
"""
