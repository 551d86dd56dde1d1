"""$ python examples/hello_rpc.py
[1, 2, 4, 8, 16]
there and back
"""

import rpcdist

if __name__ == "__main__":
    with rpcdist.LocalCluster(2):  # this process is worker0, and starts worker1
        rpc = rpcdist.rpc
        print(rpc.wait_all([rpc.rpc_async("worker1", pow, (2, n)) for n in range(5)]))
        text = rpc.remote("worker1", bytearray, (b"there",))  # a reference: the object stays on worker1
        text.rpc_sync().extend(b" and back")
        print(text.to_here().decode())
