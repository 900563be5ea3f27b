"""What a link gives a plain TCP stream.

python -m bench.dispatch_tcp sink ADDRESS           prints its port, then counts what it is sent, until it is killed
python -m bench.dispatch_tcp source ADDRESS PORT    prints Gbit/s of one stream, from the first byte to the answer
"""

from __future__ import annotations

import socket
import sys
import time

_BLOCK = 1 << 20
_BLOCKS = 268  # as many bytes as 256 padded rows of the reference workload


def sink(address: str) -> None:
    """Answers every stream with the number of bytes that came."""
    buffer = bytearray(_BLOCK)
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            with server.accept()[0] as stream:
                total = 0
                while count := stream.recv_into(buffer):
                    total += count
                stream.sendall(total.to_bytes(8, "big"))


def source(address: str, port: int) -> float:
    """Gbit/s of one stream. Raises RuntimeError if not all of it came."""
    block = bytes(_BLOCK)
    with socket.create_connection((address, port)) as stream:
        begin = time.perf_counter()
        for _ in range(_BLOCKS):
            stream.sendall(block)
        stream.shutdown(socket.SHUT_WR)
        came = int.from_bytes(stream.recv(8), "big")
        seconds = time.perf_counter() - begin
    if came != _BLOCK * _BLOCKS:
        raise RuntimeError(f"dispatch_tcp: {came} bytes came of {_BLOCK * _BLOCKS}.")
    return came * 8 / seconds / 1e9


if __name__ == "__main__":
    if sys.argv[1] == "sink":
        sink(sys.argv[2])
    else:
        print(source(sys.argv[2], int(sys.argv[3])))
