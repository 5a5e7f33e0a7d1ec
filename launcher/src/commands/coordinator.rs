//! `cox coordinator`: serves one run to its end.

use std::{
    net::{SocketAddr, TcpListener},
    os::fd::AsFd,
    path::Path,
    time::Duration,
};

use clap::Args;
use coxswain_coordinator::{
    Budgets, ConnectionBounds, JournalError, Options, Outcome as RunOutcome, Patience, ServeError,
    StartError, World,
};
use coxswain_identity::Door;
use coxswain_proto::{ids::Step, limits, v1};
use nix::sys::statfs::{FsType, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, statfs};

use super::spec_args::SpecArgs;
use crate::{
    clock,
    credentials::OfLaunch,
    exit::{CliError, Exit, Outcome},
    launch::{
        inputs::process_env,
        rdzv_conf::wait_of,
        rendezvous::{self, ORPHAN_PATIENCE},
        world::Nodes,
    },
    supervise::signals,
    threads,
};

/// What a run may spend on repairs.
#[derive(Args, Debug)]
struct BudgetArgs {
    /// Workers that wait with the model loaded to replace a lost or slow one
    #[arg(long, value_name = "N", default_value_t = 0)]
    spares: u32,
    /// Maximum number of faults to survive; workers lost together count as one
    #[arg(long, alias = "max_restarts", value_name = "N", default_value_t = limits::MAX_RESTARTS)]
    max_restarts: u32,
    /// Maximum number of planned changes of the world size [default: no bound]
    #[arg(long, alias = "max_rescales", value_name = "N")]
    max_rescales: Option<u32>,
}

/// Flags of `cox coordinator`.
#[derive(Args, Debug)]
pub struct CoordinatorArgs {
    #[command(flatten)]
    spec: SpecArgs,
    /// Address to listen on; COX_TOKEN or COX_TOKEN_FILE is needed unless it is loopback [default:
    /// launch.listen, or 127.0.0.1:29400]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Take the listening socket from standard input, as inetd hands it over
    #[arg(long, hide = true, conflicts_with = "listen")]
    listen_stdin: bool,
    /// Machines: N, or MIN:MAX
    #[arg(long, default_value_t = Nodes::fixed(1), value_name = "N|MIN:MAX")]
    nnodes: Nodes,
    /// Workers on each machine [default: launch.nproc_per_node, or 1]
    #[arg(long, alias = "nproc_per_node", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    nproc_per_node: Option<u32>,
    /// Run id [default: the journal's, else a new one]
    #[arg(long, alias = "rdzv_id", value_name = "ID")]
    rdzv_id: Option<String>,
    /// Seconds to wait until the minimum of machines has joined [default: 600]
    #[arg(long, alias = "join_timeout", value_name = "SECONDS")]
    join_timeout: Option<f64>,
    /// Seconds to wait for more machines once the minimum has joined [default: 30]
    #[arg(long, alias = "last_call", value_name = "SECONDS")]
    last_call: Option<f64>,
    #[command(flatten)]
    budgets: BudgetArgs,
    /// Serve other machines without TLS: tokens and the run's configuration travel unencrypted
    #[arg(long)]
    plaintext: bool,
    /// Replace a coordinator that was just lost: resume even if train.resume is false
    #[arg(long, hide = true)]
    restarted: bool,
    /// Id of the launcher that started this coordinator
    #[arg(long, hide = true, value_name = "ID")]
    hosted_by: Option<String>,
    /// Number of this coordinator's claim to its role, if other launchers may take over
    #[arg(long, hide = true, value_name = "N")]
    claim: Option<u64>,
    /// Id of the launcher that was lost with its machine and its coordinator
    #[arg(long, hide = true, value_name = "ID", requires = "claim")]
    in_place_of: Option<String>,
}

/// Threads of a coordinator: its own, its journal's, and those that wait for files.
const THREADS: usize = 6;

/// Listens if neither flag nor configuration says where: `torchrun`'s port.
const DEFAULT_LISTEN: &str = "127.0.0.1:29400";

/// Serves until the run is over or a signal arrives; a launcher's child ignores signals (`supervise::child`).
pub fn execute(args: &CoordinatorArgs) -> Outcome {
    threads::require(THREADS)?;
    let spec = args.spec.load_to_launch()?;
    let configured = spec.launch.nproc_per_node.and_then(|workers| u32::try_from(workers).ok());
    let world = World {
        min_nodes: args.nnodes.min,
        max_nodes: args.nnodes.max,
        nproc_per_node: args.nproc_per_node.or(configured).unwrap_or(1),
        spares: args.budgets.spares,
    };
    spec.check_world(world.most().max(1) as usize)?;
    let listener = args.listener(spec.launch.listen.as_deref())?;
    let stays_here = listener.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback());
    let shown = OfLaunch::resolve(Path::new(&spec.run.output_dir), &process_env, stays_here)?;
    let options = Options {
        state_dir: Some(std::path::Path::new(&spec.run.output_dir).join("coordinator")),
        spec,
        world,
        run_id: args.rdzv_id.clone(),
        door: Door::new(&shown.credentials, args.plaintext)?,
        connections: ConnectionBounds::default(),
        patience: args.patience()?,
        budgets: Budgets { restarts: args.budgets.max_restarts, rescales: args.budgets.max_rescales },
        restarted: args.restarted,
        hosted_by: args.hosted_by.clone(),
        claim: args.claim,
        in_place_of: args.in_place_of.clone(),
        built: env!("COX_BUILT"),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(CliError::internal)?;
    runtime.block_on(async {
        let mut signals = signals::catch().map_err(CliError::internal)?;
        let (told, signal) = tokio::sync::oneshot::channel();
        let shutdown = async move {
            // The receiver is read after the server has ended.
            let first = signals.next().await;
            let _ = told.send(first);
            // What the first one has begun may take its time; who sends another has none.
            tokio::spawn(async move {
                let again = signals.insistence(Some(first)).await;
                std::process::exit(Exit::Signal(again).code().into())
            });
        };
        let outcome = serve(listener, &options, shutdown).await?;
        conclude(outcome, signal)
    })
}

/// How long the lock of a journal on such a file system is waited for. Where the kernel keeps it, it ends
/// with its process; a server of files keeps it for a client that it has not yet given up.
fn lock_patience(on: FsType) -> Duration {
    // SMB 2 and later, Ceph, Lustre, GPFS, BeeGFS: `statfs` has them, and nix no names for them.
    const OTHERS: [u32; 5] = [0xfe53_4d42, 0x00c3_6400, 0x0bd0_0bd0, 0x4750_4653, 0x1983_0326];
    match on == NFS_SUPER_MAGIC || on == SMB_SUPER_MAGIC || OTHERS.contains(&(on.0 as u32)) {
        true => limits::LOCK_PATIENCE,
        false => ORPHAN_PATIENCE,
    }
}

/// Serves the run. A coordinator that holds the run's state may be the one of a launcher that was just
/// killed, or of a machine that was: it is waited for.
async fn serve(
    listener: TcpListener,
    options: &Options,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<RunOutcome, CliError> {
    let began = clock::now();
    let mut told = false;
    tokio::pin!(shutdown);
    loop {
        let socket =
            listener.try_clone().and_then(tokio::net::TcpListener::from_std).map_err(CliError::internal)?;
        match coxswain_coordinator::serve(socket, options.clone(), &mut shutdown).await {
            Err(ServeError::Start(StartError::Journal(JournalError::InUse { directory }))) => {
                // What cannot be asked for its kind is not one of a server.
                let patience = statfs(&directory)
                    .map_or(ORPHAN_PATIENCE, |found| lock_patience(found.filesystem_type()));
                if began.elapsed() >= patience {
                    let error = StartError::Journal(JournalError::InUse { directory });
                    return Err(refused(error.into(), options.restarted));
                }
                if began.elapsed() >= ORPHAN_PATIENCE && !std::mem::replace(&mut told, true) {
                    tracing::warn!(target: "coxswain::run", "{}", waiting(&directory, patience));
                }
                tokio::select! {
                    () = &mut shutdown => return Ok(RunOutcome::ShutDown { steps: Step(0) }),
                    () = tokio::time::sleep(ORPHAN_PATIENCE / 40) => {}
                }
            }
            served => return served.map_err(|error| refused(error, options.restarted)),
        }
    }
}

impl CoordinatorArgs {
    fn listener(&self, configured: Option<&str>) -> Result<TcpListener, CliError> {
        let listener = if self.listen_stdin {
            let socket = std::io::stdin().as_fd().try_clone_to_owned();
            TcpListener::from(socket.map_err(|error| CliError::usage(format!("--listen-stdin: {error}")))?)
        } else {
            let address = match (self.listen, configured) {
                (Some(address), _) => address.to_string(),
                (None, Some(address)) => address.to_owned(),
                (None, None) => DEFAULT_LISTEN.to_owned(),
            };
            rendezvous::listen(&address).map_err(|error| {
                CliError::new(Exit::Rendezvous, format!("cannot listen at {address}: {error}"))
            })?
        };
        listener
            .set_nonblocking(true)
            .map_err(|error| CliError::usage(format!("the listening socket cannot be used: {error}")))?;
        Ok(listener)
    }

    fn patience(&self) -> Result<Patience, CliError> {
        let seconds = |flag: &str, given: Option<f64>, default: Duration| match given {
            None => Ok(default),
            Some(seconds) => wait_of(seconds).ok_or_else(|| {
                CliError::usage(format!(
                    "{flag} {seconds}: expected a number of seconds, at most 31536000 (a year)"
                ))
            }),
        };
        let default = Patience::default();
        Ok(Patience {
            rendezvous: seconds("--join-timeout", self.join_timeout, default.rendezvous)?,
            last_call: seconds("--last-call", self.last_call, default.last_call)?,
            ..default
        })
    }
}

/// Why nothing happens.
fn waiting(directory: &Path, patience: Duration) -> String {
    format!(
        "the journal in {} is on a network file system and locked; waiting for up to {} s. Either a \
         coordinator of this run is on another machine, or its machine is lost and the file server still \
         holds the lock (90 s with NFSv4)",
        directory.display(),
        patience.as_secs()
    )
}

/// What a coordinator that has served a moment ago finds wrong when it is started again is no mistake of the
/// user's: its launcher tries once more, for a disk may have room again.
fn refused(error: ServeError, restarted: bool) -> CliError {
    let exit = match error {
        // Its launcher takes that for no death: it is not started again.
        ServeError::Journal(JournalError::Superseded { .. })
        | ServeError::Start(StartError::Journal(JournalError::Superseded { .. })) => Exit::Rendezvous,
        ServeError::Unprotected { .. }
        | ServeError::Tokens(_)
        | ServeError::World { .. }
        | ServeError::Start(_)
            if !restarted =>
        {
            Exit::Usage
        }
        _ => Exit::Internal,
    };
    CliError::new(exit, error)
}

fn conclude(outcome: RunOutcome, mut signal: tokio::sync::oneshot::Receiver<i32>) -> Outcome {
    match outcome {
        RunOutcome::Finished { .. } | RunOutcome::Stopped { .. } => Ok(()),
        RunOutcome::ShutDown { .. } => {
            Err(CliError::silent(signal.try_recv().map_or(Exit::Done, Exit::Signal)))
        }
        // The coordinator's log has named the cause.
        RunOutcome::Failed(cause) => {
            Err(CliError::silent(Exit::of_cause(v1::FailureKind::from(cause.kind).into())))
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::statfs::{EXT4_SUPER_MAGIC, TMPFS_MAGIC};

    use super::*;

    #[test]
    fn the_lock_of_a_dead_client_is_waited_for_where_a_server_keeps_it() {
        const LEASE: Duration = Duration::from_secs(90);
        let lustre = FsType(0x0bd0_0bd0);
        for served in [NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, lustre] {
            assert!(lock_patience(served) > LEASE, "{served:?}");
        }
        for local in [EXT4_SUPER_MAGIC, TMPFS_MAGIC] {
            assert_eq!(lock_patience(local), ORPHAN_PATIENCE, "{local:?}");
        }
        let line = waiting(Path::new("runs/a/coordinator"), lock_patience(NFS_SUPER_MAGIC));
        assert!(line.contains("runs/a/coordinator") && line.contains("up to 120 s"), "{line}");
    }
}
