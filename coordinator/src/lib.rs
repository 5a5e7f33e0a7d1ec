//! The coordinator: membership, leases, ledgers and control of one run, over gRPC. It never links burn and
//! reads no data.
//!
//! ```text
//! connections as they come in, up to a bound
//! service     gRPC: decode, ask, encode                workers.rs  people.rs  metrics.rs
//! tensorboard the same news as scalars on disk
//! driver      the one task that owns the core          clock.rs reads the time, journal/ keeps the records,
//!                                                      log/ writes
//! core        decisions as values: handle(now, event) -> actions
//! ```
//!
//! [`serve`] runs one run from its rendezvous to its end.

#![forbid(unsafe_code)]

mod aside;
mod clock;
mod connections;
pub mod core;
mod driver;
pub mod event_file;
pub mod journal;
pub mod log;
mod options;
mod pace;
mod ration;
mod service;
mod standing;
mod startup;
mod tensorboard;
pub mod wandb_file;

/// What stands between those who only read and the driver, for simulations of floods: in whatever time they
/// keep.
pub mod reads {
    pub use crate::{
        clock::monotonic,
        driver::looks::{Look, Looks},
        pace::Peer,
        service::readers::{Place, ReadCaller, ReadKind, Readers},
        standing::Standings,
    };
}

use std::{future::Future, net::SocketAddr, path::Path};

pub use crate::core::{failure::Failure, report::StateSource};
use coxswain_identity::{IdentityError, Scope};
use coxswain_proto::limits;

pub use aside::set_aside;
pub use journal::JournalError;
pub use options::{Budgets, CauseKind, ConnectionBounds, FirstCause, Options, Outcome, Patience, World};
pub use startup::{Opening, Resumption, StartError};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;

use crate::{connections::Connections, driver::Driver, service::RunFacts, tensorboard::Scalars};

/// Why a coordinator did not serve, or stopped serving.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Reachable from elsewhere, and open to everyone, or in clear.
    #[error("{address} can be reached from other machines: {problem}")]
    Unprotected {
        /// Where it listens.
        address: SocketAddr,
        /// What to do.
        problem: &'static str,
    },
    /// No worker could come in.
    #[error(transparent)]
    Tokens(#[from] IdentityError),
    /// A world of no worker, or of more than can be counted.
    #[error(
        "impossible world (nodes: {}:{}, workers per node: {}, spares in total: {}): use 1 to {max} workers, \
         and fewer spares than workers",
        world.min_nodes, world.max_nodes, world.nproc_per_node, world.spares
    )]
    World {
        /// As asked for.
        world: World,
        /// The most there may be.
        max: usize,
    },
    /// What is on disk.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The journal failed while the run went on.
    #[error("{0}; the run cannot continue without its journal")]
    Journal(#[from] JournalError),
    /// The transport.
    #[error("cannot serve: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// The descriptors.
    #[error("cannot serve gRPC reflection: {0}")]
    Reflection(#[from] service::ReflectionError),
    /// The listener.
    #[error("cannot read the listener's address: {0}")]
    Listener(#[from] std::io::Error),
    /// A defect of ours.
    #[error("internal error: the coordinator's event loop ended: {0}")]
    Driver(#[from] tokio::task::JoinError),
}

/// Serves one run on `listener` until it is over and every worker has left, or until `shutdown` completes.
///
/// A shutdown is not a stop: workers keep training and look for the coordinator until their patience ends. To
/// end a run, ask `Control.StopRun` first.
pub async fn serve(
    listener: TcpListener,
    options: Options,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<Outcome, ServeError> {
    let address = listener.local_addr()?;
    check(&options, address)?;
    let stop = CancellationToken::new();
    let start = startup::prepare(&options, &stop)?;
    let facts = RunFacts {
        run_id: start.identity.run_id.clone(),
        run_name: start.identity.run_name.clone(),
        document: (&options.spec).into(),
        version: start.config.version.clone(),
        world: options.world.size(),
        output_dir: options.spec.run.output_dir.clone(),
        hosted_by: options.hosted_by.clone(),
        claim: options.claim,
    };
    greet(&facts, &start, address);
    let journal = start.journal.clone();
    let log = log::Log::new(&facts.run_id, options.spec.train.log_every);
    let (driver, handle) = Driver::new(start.config, start.journal, log);
    let news = handle.subscribe().expect("the driver has just been made");
    let scalars =
        Scalars::follow(news, Path::new(&options.spec.run.output_dir), options.spec.train.log_every);
    let router = service::router(handle, facts, options.door.tokens(), options.connections).await?;
    let connections = Connections::new(listener, options.door, options.connections);
    let outcome = run(connections, driver, router, stop, shutdown).await;
    journal.close().await;
    scalars.finished().await;
    outcome
}

async fn run(
    connections: Connections,
    driver: Driver,
    router: Router,
    stop: CancellationToken,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<Outcome, ServeError> {
    let over = CancellationToken::new();
    // A set ends its tasks with itself: dropping this future kills the coordinator.
    let mut driving = JoinSet::new();
    driving.spawn(driver.run(stop.clone()));
    let server = router.serve_with_incoming_shutdown(connections, over.clone().cancelled_owned());
    tokio::pin!(server, shutdown);
    let outcome = loop {
        tokio::select! {
            Some(outcome) = driving.join_next() => break outcome??,
            () = &mut shutdown, if !stop.is_cancelled() => stop.cancel(),
            ended = &mut server => {
                ended?;
                stop.cancel();
                let outcome = driving.join_next().await.expect("the driver is joined once");
                return Ok(outcome??);
            }
        }
    };
    over.cancel();
    // The last answers go out; a client that does not take them is not waited for.
    if let Ok(ended) = tokio::time::timeout(limits::DRAIN_TIMEOUT, server).await {
        ended?;
    }
    Ok(outcome)
}

fn check(options: &Options, address: SocketAddr) -> Result<(), ServeError> {
    options.door.check(address).map_err(|problem| ServeError::Unprotected { address, problem })?;
    options.door.tokens().map_or(Ok(()), |tokens| tokens.require(Scope::Worker))?;
    let (world, max) = (options.world, limits::MAX_WORLD);
    let size = u64::from(world.max_nodes) * u64::from(world.nproc_per_node);
    if world.least() == 0 || world.min_nodes > world.max_nodes || size > max as u64 {
        return Err(ServeError::World { world, max });
    }
    Ok(())
}

fn greet(facts: &RunFacts, start: &startup::Start, address: SocketAddr) {
    let RunFacts { run_id, world, version, .. } = facts;
    let (checkpoint, life) = (start.config.checkpoints.last().map(|newest| newest.step), start.config.life);
    let first_step = start.config.past.committed.or(checkpoint).unwrap_or_default().0;
    let from = match (start.config.past.committed, checkpoint) {
        (Some(committed), _) if committed.0 > 0 => format!("continuing from step {committed}"),
        (_, Some(step)) => format!("training from the checkpoint at step {step}"),
        (_, None) => "training from the beginning".to_owned(),
    };
    let workers = match (start.config.world.least(), *world) {
        (least, world) if least < world => format!("{least} to {world} workers"),
        (_, 1) => "1 worker".to_owned(),
        (_, world) => format!("{world} workers"),
    };
    tracing::info!(
        target: "coxswain::run",
        run_id, %address, world, version, first_step, life,
        "{run_id} on {address}: waiting for {workers}, {from} (cox {version})"
    );
}
