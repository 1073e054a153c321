@0xb7c1e0d4f3a95c21;
# Values that every interface of the project speaks: errors, hash lists, manifests.

enum ErrorKind {
  # What a caller can do about it decides the kind; the text says the rest.

  badRequest @0;        # The caller sent something malformed; sending it again will not help.
  unknownInstance @1;   # No such instance here (for example after a daemon restart): open and register again.
  notReady @2;          # The instance has ranks that have not registered yet: treat as a miss, ask later.
  leaseExpired @3;      # The lease is unknown, expired, of another owner, or already redeemed: recompute.
  manifestMismatch @4;  # The namespace holds keys of another identity; `field` names what differs.
  versionMismatch @5;   # No protocol version in common.
  overloaded @6;        # Too many calls in flight on this connection, or a queue is full: a miss, back off.
  outOfSpace @7;        # No room, and nothing that may be evicted.
  deadlineExceeded @8;  # The caller's deadline passed before the work was done; nothing became visible.
  memoryGone @9;        # The engine's registered memory can't be read or written any more.
  shuttingDown @10;     # The daemon drains; connect again later.
  internal @11;         # A bug of the daemon; counted and logged there.
}

struct Error {
  kind @0 :ErrorKind;
  message @1 :Text;     # One sentence: what, where, what would be right.
  field @2 :Text;       # The offending field or flag, empty when there is none.
}

struct Hashes {
  # A run of block hashes in prefix order, in one Data: a list of Data costs 40 us more a 640.

  width @0 :UInt8;      # Bytes a hash; 16..64. Zero only when `packed` is empty.
  packed @1 :Data;      # The hashes back to back; its length is a multiple of `width`.
}

struct Manifest {
  # Key identity: two engines share blocks of a namespace only if every field is equal.

  fields @0 :List(Field);

  struct Field {
    name @0 :Text;      # kebab-case, unique within the manifest.
    value @1 :Text;
  }
}
