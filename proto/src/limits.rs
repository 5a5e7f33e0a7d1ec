//! Every bound of the system, with the reason for its size.

use std::time::Duration;

/// Workers in one run. Rings and ledgers are linear in it; 100,000 is the scale the coordinator is measured
/// at.
pub const MAX_WORLD: usize = 100_000;
/// From so many workers on, launchers speak for theirs ([`NodeNews`](crate::v1::NodeNews)) unless they are
/// told otherwise: below it, a direct stream of each is one part less that can break.
pub const ONE_STREAM_FROM: u32 = 1024;
/// Workers that one launcher may speak for.
pub const MAX_NODE_WORKERS: usize = 1024;
/// How long a launcher gathers the step reports of its workers: they finish a step within milliseconds of
/// each other, and no rank waits for the answer.
pub const NODE_GATHERING: Duration = Duration::from_millis(5);
/// Steps granted to a rank at once: long enough that a restart of the coordinator stalls no rank, short
/// enough to re-plan quickly.
pub const LEASE_STEPS: u64 = 32;
/// Directives waiting for one trainer thread. Commands are few; a full channel means the trainer is stuck.
pub const DIRECTIVE_QUEUE: usize = 64;
/// Encoder batches of features that may wait to be written beside training: enough that a write hides behind
/// the next batch.
pub const FEATURES_WAITING: usize = 2;
/// Cache phases of the feature cache that are remembered. A rollback over more of them would find its oldest
/// cached phase undecided, and give it a generation of its own.
pub const MAX_CACHE_PHASES: usize = 65_536;
/// Generations of the feature cache, and measurements of drift, that `status` shows.
pub const MAX_LISTED_CACHE: usize = 8;
/// How long the coordinator waits for a measurement of drift when no rank is measuring.
pub const DRIFT_TIMEOUT: Duration = Duration::from_secs(20);
/// Reports waiting for the coordinator. A rank trains this many steps through a coordinator outage before it
/// blocks.
pub const REPORT_QUEUE: usize = 4096;
/// Events kept for slow `Watch` clients before the oldest are dropped.
pub const WATCH_QUEUE: usize = 1024;
/// Largest gRPC message: a run spec or a status of `MAX_LISTED_RANKS` ranks fits.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// Ranks that a status and a table of memory list: of a larger world those that something is the matter with,
/// and then the first.
pub const MAX_LISTED_RANKS: usize = 10_000;
/// Connections that the coordinator has open at once: one of each launcher and each worker that speaks for
/// itself, and as many of people and their tools. For more, the oldest make room of those that have made no
/// call that may be made, or have only read.
pub const MAX_CONNECTIONS: usize = 30_000;
/// Connections that wait to be accepted, of a coordinator, a ring and the parts of a rank: as many as may
/// come at once, for one that the kernel has no room for is tried again by its caller a second later. The
/// kernel has `net.core.somaxconn` places at most.
pub const BACKLOG: i32 = MAX_CONNECTIONS as i32;
/// From TLS's handshake to a connection's first call that may be made: it is closed without one.
pub const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Calls and streams at once on one of them. A worker has a handful, and a launcher speaks for all of its
/// workers on one; what a connection may send before it has an answer is handled in tens of milliseconds.
pub const MAX_STREAMS: u32 = 128;
/// Largest request of people and their tools: the longest has a reason of [`MAX_ERROR_TEXT`].
pub const MAX_CONTROL_REQUEST: usize = 64 << 10;
/// Between two looks at the core that answer readers; all readers that came in between share one.
pub const LOOK_PAUSE: Duration = Duration::from_millis(50);
/// Calls that only look, at once: of everybody, and of one caller (a token).
pub const MAX_READS: (usize, usize) = (32, 16);
/// Pages of the ledger and histories at once, likewise: each may be as large as a message.
pub const MAX_RECORD_READS: (usize, usize) = (4, 2);
/// Streams of events at once, likewise; those of launchers are bounded by their connections alone.
pub const MAX_WATCHERS: (usize, usize) = (64, 32);
/// All of these at once on one connection.
pub const MAX_READS_OF_CONNECTION: usize = 8;
/// A read may take so long: the rest of its request to come, fresh reports of memory, and its answer to be
/// taken.
pub const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// What is read for a caller, out of the journal, and of the core may each take one part in so many of a
/// processor's time: of the two that a small machine has, all of it is less than a tenth.
pub const READ_SHARE: u32 = 20;
/// How much of [`READ_SHARE`] a caller that has not read for a while may use at once.
pub const READ_CREDIT: Duration = Duration::from_millis(250);
/// After which a reader that was refused is told to come again.
pub const READ_PAUSE: Duration = Duration::from_secs(1);
/// What a connection may say at once: HTTP/2's settings and the headers of a first call, with the longest
/// token and name of a host. Until a call on it was let in that does more than look, the rest comes in
/// pieces, and all such connections take turns: with hundreds of them, each waits for seconds.
pub const GREETING: usize = 1024;
/// Such a piece, and the time of its turn. Calls have 16 bytes at least, and cost some 50 us to refuse: all
/// of them together take a thirtieth of a core. Answers of 10 MiB a second are still acknowledged.
pub const READ_PIECE: (usize, Duration) = (256, Duration::from_millis(25));
/// A connection on which a read was refused within this time is read more slowly yet.
pub const REFUSAL_REMEMBERED: Duration = Duration::from_secs(5);
/// The time between two of its pieces, besides.
pub const REFUSED_PAUSE: Duration = Duration::from_millis(500);
/// Between two lines of the log about connections or calls for which there was no room.
pub const NO_ROOM_PAUSE: Duration = Duration::from_secs(60);
/// Between two tries to accept a connection where the machine has no room for one (file descriptors, memory).
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A worker says that it lives this often.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// A worker whose line is closed counts as lost unless it is opened again in this time. A worker reopens it
/// within tens of milliseconds if it lives, so this is dominated by a machine with more compute threads than
/// cores.
pub const SILENCE_TIMEOUT: Duration = Duration::from_millis(700);
/// A worker whose line is open counts as frozen after this long without a heartbeat.
pub const HANG_TIMEOUT: Duration = Duration::from_secs(3);
/// A node whose launcher's line stays closed for this long is gone.
pub const NODE_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a coordinator that was restarted waits for those it knew: their backoff is at most a second.
pub const REUNION_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a launcher asks again for a place that another one has: so long may it take until a launcher that
/// died is missed.
pub const PLACE_PATIENCE: Duration = REUNION_TIMEOUT.saturating_add(NODE_TIMEOUT);
/// How long an elastic world waits for a lost worker's successor before it trains without it.
pub const RESPAWN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an elastic world waits for more nodes when the fewest are there; as `torchrun`'s last call.
pub const LAST_CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// A rank that heartbeats but stands still is named this long after three times of what its work has ever
/// taken. With the second between heartbeats and the second between looks it is named within 10 s.
pub const STANDSTILL_TIMEOUT: Duration = Duration::from_secs(7);
/// Without a byte of the part of frozen weights that another rank was asked for, which is then read from the
/// files: longer than a thread of a busy machine waits for its turn.
pub const PART_TIMEOUT: Duration = Duration::from_secs(3);
/// For which a rank that did not answer is not asked for parts again.
pub const PART_PAUSE: Duration = Duration::from_secs(30);
/// Where a rank may be waiting for a disk it is given up only so long after it was named: file systems of
/// clusters stall.
pub const DISK_TIMEOUT: Duration = Duration::from_secs(20);
/// A rank that shows no sign of motion for this long is named though nothing is known of how long its work
/// takes.
pub const STILL_NAMED: Duration = Duration::from_secs(60);
/// A rank that shows no sign of motion for this long is given up, whatever it may be waiting for.
pub const STILL_TIMEOUT: Duration = Duration::from_secs(300);
/// How long a rank may show no sign of motion where most ranks stand still alike.
pub const STILL_ALL_TIMEOUT: Duration = Duration::from_secs(1800);
/// A process is never expected to make itself known sooner than this after its start, however soon others
/// have: pages of the program that one machine has in memory another reads from its disk.
pub const START_FLOOR: Duration = Duration::from_secs(1);
/// Between two looks at whether all ranks move.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Faults that a run survives unless `--max-restarts` says otherwise.
pub const MAX_RESTARTS: u32 = 3;
/// Failures of a row, on different workers or in different generations, before it is left out.
pub const SAMPLE_TRIES: usize = 2;
/// Rows that failed on one worker alone before it is taken for the worker's fault.
pub const OPEN_SAMPLES: usize = 3;
/// Data sets of a mixture: each is opened by every worker, and named in the status.
pub const MAX_SETS: usize = 64;
/// Bytes of `data.bucket_cache` at least: what sixteen samples read at the same time, in blocks of 1 MiB.
pub const MIN_BUCKET_CACHE: u64 = 256 << 20;
/// Rows of the data set that a run may leave out; more are a bad data set.
pub const MAX_QUARANTINED: usize = 64;
/// Samples that may need one row of the data set: those whose chunk of actions reaches it.
pub const MAX_SAMPLES_OF_ROW: u64 = 65_536;
/// Samples that are named for a step that was left out; a damaged one is among the first, or all are.
pub const MAX_SKIPPED_SAMPLES: usize = 64;
/// Steps that a checkpoint says were left out, the newest: more than may be done and told to nobody.
pub const MAX_SKIPS_IN_CHECKPOINT: usize = 64;
const _: () = assert!(MAX_SKIPS_IN_CHECKPOINT as u64 > LEASE_STEPS);
/// Steps that a run file may name to be left out: more are another data set.
pub const MAX_SKIPPED_STEPS: usize = 4096;
/// Memberships that the journal lists: years of a machine that comes and goes every hour.
pub const MAX_GENERATIONS_KEPT: usize = 16_384;
/// Faults that the journal lists, the newest; a run with as many restarts would have others to look at first.
pub const MAX_FAULTS_KEPT: u64 = 16_384;
/// Refusals of callers that ask again and again that are remembered, so that each is told once; more surplus
/// launchers are told anew.
pub const MAX_REFUSALS_KEPT: usize = 256;
/// Bytes of a name that a worker or launcher gives: host, address, device, path. The longest are paths, of
/// 4,096.
pub const MAX_NAME_BYTES: usize = 4096;
/// Bytes of a name that `status` tells of every rank: the longest of a host that DNS has, and of a device.
pub const MAX_SHORT_NAME_BYTES: usize = 255;
/// Ranges of samples in one report. A rank's part of a step is one range, with a hole for each quarantined
/// row in it, and each of these may be needed by samples in several places.
pub const MAX_SAMPLE_RANGES: usize = 4096;
/// Largest count that is taken from the wire: bytes, samples, tokens. The sum over the ranks of the largest
/// world does not overflow.
pub const MAX_COUNT: u64 = 1 << 47;
/// Longest time of a step, or of a part of one, that is taken from the wire.
pub const MAX_STEP_TIME: Duration = Duration::from_secs(24 * 60 * 60);
/// Metrics in the report of a step: a time for each stage, a few figures for each parameter group, and where
/// held-out samples were looked at, their error by part.
pub const MAX_METRICS: usize = 256;
/// Parts by which a task tells the error on held-out samples; more are not told.
pub const MAX_PARTS: usize = 160;
/// Parts that `status` shows of each rank: those of all ranks that it lists fit a message beside everything
/// else.
pub const MAX_RANK_METRICS: usize = 8;
/// Bytes of a metric's name.
pub const MAX_METRIC_NAME_BYTES: usize = 64;
/// Bytes of its unit.
pub const MAX_METRIC_UNIT_BYTES: usize = 16;
/// Ranks' lines in one page of the ledger, some 30 bytes each: a page fits a message in the largest world,
/// too.
pub const MAX_LEDGER_RANKS: usize = 250_000;
/// Generations in a row that may end without a committed step.
pub const MAX_STALLED_GENERATIONS: u32 = 3;
/// How long the coordinator waits for workers to leave after the run is over, before it ends without them.
pub const FAREWELL_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a launcher, or a person, waits for an answer that is there at once.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long `GetMemory` waits for fresh reports: ranks answer at a step boundary.
pub const MEMORY_REFRESH_TIMEOUT: Duration = Duration::from_secs(10);
/// Ranks are asked for fresh reports at most this often for all callers; a reset is always passed on.
pub const MEMORY_REFRESH_PAUSE: Duration = Duration::from_secs(1);
/// Checkpoints shown by `status`, newest last.
pub const MAX_LISTED_CHECKPOINTS: usize = 32;
/// Steps in one page of the ledger.
pub const MAX_LEDGER_PAGE: usize = 1000;
/// Steps that a coordinator without a state directory remembers.
pub const LEDGER_KEPT: usize = 100_000;
/// Calls of workers, launchers and people who steer that wait for the coordinator's core; those that only
/// look wait elsewhere. A full queue holds callers back, never the data plane.
pub const INBOX_QUEUE: usize = 4096;
/// Lines that wait for a console that does not take them; more are dropped and counted. A table of all ranks
/// fits.
pub const CONSOLE_QUEUE: usize = 16_384;
/// How long a process that ends waits for its console to take what is left.
pub const CONSOLE_PATIENCE: Duration = Duration::from_secs(2);
/// How long the last answers may take when a server shuts down.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// Times a coordinator may be started again within [`COORDINATOR_WINDOW`]: what dies faster than this dies of
/// the same cause each time.
pub const COORDINATOR_RESTARTS: usize = 5;
/// See [`COORDINATOR_RESTARTS`].
pub const COORDINATOR_WINDOW: Duration = Duration::from_secs(60);
/// How long a worker looks for a coordinator that has gone before it gives up.
pub const COORDINATOR_PATIENCE: Duration = Duration::from_secs(120);
/// How long a coordinator waits for the lock of a journal on a network file system: a server that lost a
/// client keeps its locks for a lease, of 90 s with NFSv4, and a little more until it has noticed.
pub const LOCK_PATIENCE: Duration = Duration::from_secs(120);
/// How long the rendezvous waits for the whole world.
pub const RENDEZVOUS_TIMEOUT: Duration = Duration::from_secs(600);
/// A fault of hardware is kept in so many characters, one for each slot.
pub const MAX_HARDWARE_TEXT: usize = 300;
/// An error text carried in a report is cut to this.
pub const MAX_ERROR_TEXT: usize = 8 << 10;
/// Bytes of a run configuration file. Real ones have a few thousand; a data set given by mistake is refused
/// unread.
pub const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Bytes of a file of metadata: `info.json`, `config.json`, statistics, tasks. A data set of a million
/// episodes has 500 bytes for each in the longest of them.
pub const MAX_METADATA_BYTES: u64 = 1 << 29;
/// Bytes of the file of one picture.
pub const MAX_PICTURE_BYTES: u64 = 1 << 28;
/// Bytes of a tokenizer's file; that of a quarter of a million pieces has 33 MiB.
pub const MAX_TOKENIZER_BYTES: u64 = 1 << 28;
/// Bytes of what a worker process writes of its own steps (`COX_WITNESS`): 300,000 steps or so.
pub const MAX_WITNESS_BYTES: u64 = 1 << 26;
/// Bytes of what a worker process has written of its steps and a disk that is full has not taken yet.
pub const MAX_UNWRITTEN_BYTES: usize = 1 << 20;
/// Bytes of a checkpoint's manifest: a line for each rank of the largest world is 20 MiB.
pub const MAX_MANIFEST_BYTES: u64 = 32 << 20;
/// Values of one feature in one frame; a frame of 8K video in colour has 2^27.
pub const MAX_FEATURE_VALUES: usize = 1 << 28;
/// Values in a run configuration after its aliases are expanded, so that nested aliases cannot exhaust
/// memory.
pub const MAX_CONFIG_NODES: usize = 100_000;
/// Unknown keys of a run configuration that are named, each with what may have been meant.
pub const MAX_UNKNOWN_KEYS: usize = 32;
/// Levels of nesting in a run configuration; the deepest key of a [`RunSpec`](crate::run_spec::RunSpec) is at
/// four.
pub const MAX_CONFIG_DEPTH: usize = 32;

const _: () = assert!(MAX_ERROR_TEXT * 2 < MAX_CONTROL_REQUEST);
const _: () = assert!(MEMORY_REFRESH_TIMEOUT.as_millis() < READ_TIMEOUT.as_millis());
const _: () = assert!(HANG_TIMEOUT.as_millis() >= 3 * HEARTBEAT_INTERVAL.as_millis());
// A rank that waits for another one's part in vain does not count as standing still.
const _: () = assert!(PART_TIMEOUT.as_millis() < STANDSTILL_TIMEOUT.as_millis());
const _: () = assert!(STILL_TIMEOUT.as_millis() < RENDEZVOUS_TIMEOUT.as_millis());
const _: () = assert!(MAX_LEDGER_RANKS >= MAX_WORLD && MAX_LEDGER_RANKS * 60 <= MAX_MESSAGE_BYTES);
// A metric is its name, its unit, and less than 24 bytes; a rank is its metrics, two names, and less than
// 250.
const _: () = assert!(
    ((MAX_METRIC_NAME_BYTES + MAX_METRIC_UNIT_BYTES + 24) * MAX_RANK_METRICS
        + 2 * MAX_SHORT_NAME_BYTES
        + 250)
        * MAX_LISTED_RANKS
        <= MAX_MESSAGE_BYTES
);
// A lock is waited for while launchers and workers still look for the coordinator.
const _: () = assert!(LOCK_PATIENCE.as_millis() < RENDEZVOUS_TIMEOUT.as_millis());
const _: () = assert!(MAX_COUNT.checked_mul(MAX_WORLD as u64).is_some());
const _: () = assert!(REUNION_TIMEOUT.as_millis() >= HANG_TIMEOUT.as_millis());
const _: () = assert!(PLACE_PATIENCE.as_millis() < RENDEZVOUS_TIMEOUT.as_millis());
// A call that was under way when the coordinator died fails, and is made again, while the coordinator is
// still looked for.
const _: () = assert!(CALL_TIMEOUT.as_millis() * 2 < COORDINATOR_PATIENCE.as_millis());
