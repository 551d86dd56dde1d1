"""Python values on the wire; docs/values.md describes the format and its promises.

Programs that speak the protocol themselves, such as attackers in tests, import `encode_into` from here.
"""

from rpcdist.rpc._values.codec import encode_into as encode_into
