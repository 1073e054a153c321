@0xd5b2a1c6f0e94d17;
# The daemon of one host, as an engine's connector sees it.
#
# Life of an engine: every process of it connects and calls `open` with the same instance name; each
# rank's worker hands over its KV memory and calls `register`; when all `worldSize` ranks have registered
# the instance is ready. The scheduler asks `query` and gets a lease; each worker redeems the lease with
# `load`; workers `save` finished blocks. Dropping the Session, or dying, ends all that it owned.
#
# All methods answer a result union: exceptions of Cap'n Proto carry no kind. Lists of blocks travel as one
# Data of little-endian 32-bit numbers.

using Common = import "common.capnp";

interface Node {
  open @0 (request :OpenRequest) -> (result :OpenResult);
  # Start a session. Refused with versionMismatch, manifestMismatch or badRequest.

  health @1 () -> (health :Health);
  # Cheap, never waits.

  statistics @2 () -> (json :Text);
  # A flat JSON object of numbers and strings; for people and tests. Metrics are at HTTP /metrics.

  shutdown @3 (graceMillis :UInt32, bootId :Data) -> (result :EmptyResult);
  # Ask the daemon to drain and exit with 0, as SIGTERM does. Only honoured from this host
  # (loopback or a Unix-domain socket), and only with the boot id that `health` told: neither a
  # stray message nor one that was meant for the daemon before ends this one.
}

struct Health {
  ready @0 :Bool;              # Serving, and some pool memory is usable.
  bootId @1 :Data;             # 16 random bytes, new at every start of the daemon.
  version @2 :Text;            # Of the package, for people.
  poolReadyBytes @3 :UInt64;   # Usable so far; grows to poolTotalBytes in the background.
  poolTotalBytes @4 :UInt64;
}

struct OpenRequest {
  protocolMin @0 :UInt16;      # The range that the client speaks; the daemon takes the highest common one.
  protocolMax @1 :UInt16;
  client @2 :Text;             # Name, version and pid. Sessions of one instance with equal text are one process:
                               # they may load and save with each other's ranks, nobody else's may.
  instance @3 :Text;           # Unique for one engine replica (a data-parallel rank is its own instance).
  namespace @4 :Text;          # Who may share blocks; at most 256 bytes.
  manifest @5 :Common.Manifest;
  worldSize @6 :UInt32;        # Ranks that will register; 1..4096.
  monotonicNanos @7 :UInt64;   # CLOCK_MONOTONIC of the client now: deadlines are given on that clock.
}

struct OpenResult {
  union {
    ok @0 :Opened;
    error @1 :Common.Error;
  }
}

struct Opened {
  session @0 :Session;         # Held for the life of the client process; its loss ends what it owned.
  protocol @1 :UInt16;
  bootId @2 :Data;
  handover @3 :Text;           # Unix-domain socket for memory hand-over; '@' first means the abstract namespace.
  version @4 :Text;
}

interface Session {
  register @0 (request :RegisterRequest) -> (result :RegisterResult);
  # Hand over one rank's KV memory. A second registration of the same rank replaces the first.
  # The memory is let go when this session ends, or when the rank is registered again.

  query @1 (request :QueryRequest) -> (result :QueryResult);
  # How many leading blocks are cached? Takes a lease on exactly those.

  load @2 (request :LoadRequest) -> (result :LoadResult);
  # Copy leased blocks into the rank's memory. Answers when the device has let go of the memory.

  save @3 (request :SaveRequest) -> (result :SaveResult);
  # Copy blocks out of the rank's memory. Answers when the device has let go of the memory.

  release @4 (leases :List(Data)) -> (result :EmptyResult);
  # Give leases back early. Unknown ones are ignored, so it may be repeated.

  renew @5 (lease :Data) -> (result :RenewResult);
  # Start the lease's time anew; leaseExpired if it is gone.

  unregister @6 () -> (result :EmptyResult);
  # Drop everything that this session registered or leased; cached blocks stay.

  ping @7 () -> (bootId :Data);
  # Heartbeat: a session that is silent for longer than the idle limit is closed.
}

struct EmptyResult {
  union {
    ok @0 :Void;
    error @1 :Common.Error;
  }
}

struct RegisterRequest {
  rank @0 :UInt32;             # 0 .. worldSize-1.
  slotIndex @1 :UInt32;        # Which slot of a block this rank holds. Ranks with equal bytes (MLA) share one.
  slotCount @2 :UInt32;        # Slots a block; the same for all ranks of an instance.
  regions @3 :List(Region);
  groups @4 :List(GroupLayout);
}

struct Region {
  # One allocation of engine memory.

  sizeBytes @0 :UInt64;
  union {
    handedOver @1 :HandedOver;
    cudaIpc @2 :CudaIpc;
  }
}

struct HandedOver {
  # A file descriptor that was passed over the hand-over socket before.

  token @0 :Data;              # 16 bytes, chosen by the client for that message.
  index @1 :UInt16;            # Which descriptor of that message.
  offsetBytes @2 :UInt64;      # Where the region begins in the file.
}

struct CudaIpc {
  handle @0 :Data;             # 64 bytes of cudaIpcMemHandle_t.
  deviceUuid @1 :Text;         # "GPU-..." or "MIG-...": ordinals differ between processes.
  offsetBytes @2 :UInt64;      # Where the region begins behind the handle's base.
}

struct GroupLayout {
  # Where block b of one KV-cache group lies: for each run in turn,
  # region[run.region] + run.baseBytes + b * run.strideBytes, for run.lengthBytes.

  group @0 :UInt16;
  blockCount @1 :UInt32;       # Block ids are 0 .. blockCount-1.
  runs @2 :List(Run);
}

struct Run {
  region @0 :UInt16;
  baseBytes @1 :UInt64;
  strideBytes @2 :UInt64;
  lengthBytes @3 :UInt64;
}

struct RegisterResult {
  union {
    ok @0 :Registered;
    error @1 :Common.Error;
  }
}

struct Registered {
  ranksMissing @0 :UInt32;     # 0: the instance is ready.
}

struct QueryRequest {
  group @0 :UInt16;
  hashes @1 :Common.Hashes;    # In prefix order.
  parent @2 :Data;             # Hash of the block before the first one, empty at the start of a prompt.
  requestId @3 :Text;          # For logs and `explain`; no meaning to the cache.
}

struct QueryResult {
  union {
    ready @0 :Ready;
    loading @1 :Void;          # Blocks are on their way from a lower tier; ask again.
    error @2 :Common.Error;
  }
}

struct Ready {
  hitCount @0 :UInt32;         # Leading blocks that are cached; 0 has no lease.
  lease @1 :Data;              # 16 bytes; each rank may redeem it once; empty when hitCount is 0.
  ttlMillis @2 :UInt32;
}

struct LoadRequest {
  rank @0 :UInt32;
  lease @1 :Data;
  group @2 :UInt16;
  positions @3 :Data;          # u32 each: which block of the lease (0 = first hash of the query).
  blockIds @4 :Data;           # u32 each: the destination block in the rank's memory.
  deadlineNanos @5 :UInt64;    # CLOCK_MONOTONIC; no copy is begun after it.
}

struct LoadResult {
  union {
    ok @0 :Loaded;
    error @1 :Common.Error;    # Nothing, or not all, was written; every block of the call counts as failed.
  }
}

struct Loaded {
  failed @0 :Data;             # u32 each: indices into `positions` that could not be loaded; mostly empty.
}

struct SaveRequest {
  rank @0 :UInt32;
  runs @1 :List(SaveRun);
  deadlineNanos @2 :UInt64;    # CLOCK_MONOTONIC; the client keeps the blocks unchanged until then.
                               # What is not complete by then never becomes visible.
}

struct SaveRun {
  # Consecutive blocks of one request.

  group @0 :UInt16;
  hashes @1 :Common.Hashes;
  parent @2 :Data;             # Hash of the block before the first one, empty at the start of a prompt.
  blockIds @3 :Data;           # u32 each, as many as hashes.
}

struct SaveResult {
  union {
    ok @0 :Saved;
    error @1 :Common.Error;
  }
}

struct Saved {
  stored @0 :UInt32;           # Copied now.
  known @1 :UInt32;            # Already here.
  rejected @2 :UInt32;         # No room.
  failed @3 :UInt32;           # Could not be read from the rank's memory, or past the deadline.
}

struct RenewResult {
  union {
    ttlMillis @0 :UInt32;
    error @1 :Common.Error;
  }
}
