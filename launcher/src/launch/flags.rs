//! The flags of `cox run`, as `torchrun` spells them: with `-` or with `_`.
//!
//! Values are kept as text: the same text may come from a `PET_*` variable, and is read in one place
//! (`plan`).

use clap::Args;

/// Flags that say where and on how many processes a run is launched.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Launch (as torchrun; each flag also as PET_<FLAG>)")]
pub struct LaunchFlags {
    /// Number of machines: N, or MIN:MAX for an elastic run, which starts with MIN
    #[arg(long, value_name = "N|MIN:MAX")]
    pub nnodes: Option<String>,
    /// Workers on each machine: a number, `cpu` (one per core), `gpu` (one per device) or `auto`
    #[arg(long, alias = "nproc_per_node", value_name = "N|auto|gpu|cpu")]
    pub nproc_per_node: Option<String>,
    /// Workers that wait with the model loaded to replace a lost or slow one [default: 0]
    #[arg(long, value_name = "N")]
    pub spares: Option<String>,
    /// Device of the workers: `cuda` (one GPU each), `cpu`, or `auto` [default: launch.device]
    #[arg(long, value_name = "auto|cpu|cuda")]
    pub device: Option<String>,
    /// Rank of this machine [default: in order of arrival]
    #[arg(long, alias = "node_rank", value_name = "N")]
    pub node_rank: Option<String>,
    /// Run on this machine alone, with a coordinator on a free loopback port
    #[arg(long)]
    pub standalone: bool,
    /// Address of the coordinator; the default port is 29400
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST:PORT")]
    pub rdzv_endpoint: Option<String>,
    /// Run id; launchers with another id are rejected
    #[arg(long, alias = "rdzv_id", value_name = "ID")]
    pub rdzv_id: Option<String>,
    /// `is_host=true|false` (start the coordinator here), `join_timeout=SECONDS` (wait for MIN machines),
    /// `last_call_timeout=SECONDS` (then wait for up to MAX)
    #[arg(long, alias = "rdzv_conf", value_name = "KEY=VALUE,..")]
    pub rdzv_conf: Option<String>,
    /// `c10d` or `static`: accepted as torchrun's flag, without effect (the coordinator is the rendezvous)
    #[arg(long, alias = "rdzv_backend", value_name = "NAME")]
    pub rdzv_backend: Option<String>,
    /// Host of the coordinator, if `--rdzv-endpoint` is not given
    #[arg(long, alias = "master_addr", value_name = "HOST")]
    pub master_addr: Option<String>,
    /// Port of the coordinator, if `--rdzv-endpoint` is not given
    #[arg(long, alias = "master_port", value_name = "PORT")]
    pub master_port: Option<String>,
    /// Connect the workers through the launcher, on one stream to the coordinator [default: from 1024 workers
    /// on]
    #[arg(long, alias = "one_stream")]
    pub one_stream: bool,
    /// Connect machines without TLS: tokens and the run's configuration travel unencrypted
    #[arg(long)]
    pub plaintext: bool,
    /// Address at which other machines reach this machine's workers
    #[arg(long, alias = "local_addr", value_name = "ADDRESS")]
    pub local_addr: Option<String>,
    /// Maximum number of faults to survive; workers lost together count as one [default: 3; torchrun: 0]
    #[arg(long, alias = "max_restarts", value_name = "N")]
    pub max_restarts: Option<String>,
    /// Maximum number of planned changes of the world size [default: no bound]
    #[arg(long, alias = "max_rescales", value_name = "N")]
    pub max_rescales: Option<String>,
    /// Accepted and ignored: a worker's exit is noticed at once
    #[arg(long, alias = "monitor_interval", value_name = "SECONDS")]
    pub monitor_interval: Option<String>,
    /// Time for workers to write a checkpoint and exit after a signal; at most 10 s once the run is over
    /// [default: 30]
    #[arg(long, alias = "shutdown_timeout", value_name = "SECONDS")]
    pub shutdown_timeout: Option<String>,
    /// Where each rank's output goes, as rank0000/{stdout,stderr}.log [default: OUTPUT_DIR/logs]
    #[arg(long, alias = "log_dir", value_name = "DIR")]
    pub log_dir: Option<String>,
    /// Streams that go to files: 0 none, 1 stdout, 2 stderr, 3 both; for all or per local rank (0:3,1:1)
    /// [default: 3]
    #[arg(short = 'r', long, value_name = "0..3")]
    pub redirects: Option<String>,
    /// Streams that go to files and the console, as with --redirects [default: 0]
    #[arg(short = 't', long, value_name = "0..3")]
    pub tee: Option<String>,
    /// Local ranks whose output reaches the console, for instance 0,2
    #[arg(long, alias = "local_ranks_filter", value_name = "RANKS")]
    pub local_ranks_filter: Option<String>,
}
