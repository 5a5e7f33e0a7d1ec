//! The flags of `cox run`, as `torchrun` spells them: with `-` or with `_`.
//!
//! Values are kept as text: the same text may come from a `PET_*` variable, and is read in one place
//! (`plan`).

use clap::Args;

/// Flags that say where and on how many processes a run is launched.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Launch (as torchrun; each flag also as PET_<FLAG>)")]
pub struct LaunchFlags {
    /// Machines: N, or MIN:MAX; with a range training begins with MIN and goes on while machines come and go
    #[arg(long, value_name = "N|MIN:MAX")]
    pub nnodes: Option<String>,
    /// Worker processes on each machine: a number, `cpu` (one per core), `gpu` (one per device) or `auto`
    #[arg(long, alias = "nproc_per_node", value_name = "N|auto|gpu|cpu")]
    pub nproc_per_node: Option<String>,
    /// Of all workers, those that wait with the model loaded until another one is lost, or slow [default: 0]
    #[arg(long, value_name = "N")]
    pub spares: Option<String>,
    /// What workers compute on: `cuda` (one GPU each), `cpu`, or `auto` [default: launch.device]
    #[arg(long, value_name = "auto|cpu|cuda")]
    pub device: Option<String>,
    /// This machine's place among the machines; given out in order of arrival if absent
    #[arg(long, alias = "node_rank", value_name = "N")]
    pub node_rank: Option<String>,
    /// One machine, with a coordinator of its own on a free loopback port, wherever else it is told to listen
    #[arg(long)]
    pub standalone: bool,
    /// Where the coordinator listens; the port is 29400 if absent
    #[arg(long, alias = "rdzv_endpoint", value_name = "HOST:PORT")]
    pub rdzv_endpoint: Option<String>,
    /// The run's id; launchers of another run are turned away
    #[arg(long, alias = "rdzv_id", value_name = "ID")]
    pub rdzv_id: Option<String>,
    /// `is_host=true|false` (whether to start the coordinator here), `join_timeout=SECONDS` (for MIN
    /// machines), `last_call_timeout=SECONDS` (for more, up to MAX)
    #[arg(long, alias = "rdzv_conf", value_name = "KEY=VALUE,..")]
    pub rdzv_conf: Option<String>,
    /// `c10d` or `static`: accepted and without effect, the coordinator is the rendezvous
    #[arg(long, alias = "rdzv_backend", value_name = "NAME")]
    pub rdzv_backend: Option<String>,
    /// Host of the coordinator, if `--rdzv-endpoint` is not given
    #[arg(long, alias = "master_addr", value_name = "HOST")]
    pub master_addr: Option<String>,
    /// Port of the coordinator, if `--rdzv-endpoint` is not given
    #[arg(long, alias = "master_port", value_name = "PORT")]
    pub master_port: Option<String>,
    /// The launcher speaks to the coordinator for its workers, on one stream [default: from 1024 workers on]
    #[arg(long, alias = "one_stream")]
    pub one_stream: bool,
    /// No TLS between machines: tokens and the run's configuration travel in clear
    #[arg(long)]
    pub plaintext: bool,
    /// Address of this machine under which other machines reach its workers
    #[arg(long, alias = "local_addr", value_name = "ADDRESS")]
    pub local_addr: Option<String>,
    /// Faults that this launch may survive; workers that are lost together are one [default: 3; torchrun: 0]
    #[arg(long, alias = "max_restarts", value_name = "N")]
    pub max_restarts: Option<String>,
    /// Times the number of machines may change on purpose [default: no bound]
    #[arg(long, alias = "max_rescales", value_name = "N")]
    pub max_rescales: Option<String>,
    /// Accepted and without effect: the end of a worker is noticed at once
    #[arg(long, alias = "monitor_interval", value_name = "SECONDS")]
    pub monitor_interval: Option<String>,
    /// How long workers may take to write a checkpoint and leave after a signal; no longer than 10 s once the
    /// run is over [default: 30]
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
