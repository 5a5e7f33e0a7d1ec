//! A worker of a coordinator's run: reads its place from the environment and hands itself to the session.

use std::{env, sync::Arc};

use burn_flex::Flex;
use coxswain_proto::ids::Rank;
use coxswain_worker::{
    collective::RingListener,
    memory,
    session::{self, SessionError, SessionOptions},
    train::{PolicyTrainer, TrainerOptions},
};

use crate::exit::{Exit, Failed, Outcome};

/// Trains until the run is over.
pub fn train() -> Outcome {
    let local = env::var("COX_LOCAL_ADDR").unwrap_or_else(|_| "127.0.0.1".into());
    let listener =
        RingListener::bind(&format!("{local}:0")).map_err(|error| Failed::new(Exit::Rendezvous, error))?;
    let options = SessionOptions {
        token: env::var("COX_TOKEN").ok().filter(|token| !token.is_empty()),
        run_id: env::var("TORCHELASTIC_RUN_ID").unwrap_or_default(),
        rank: Rank(number("RANK")?),
        local_rank: number("LOCAL_RANK")?,
        node_rank: number("GROUP_RANK")?,
        world_size: number("WORLD_SIZE")?,
        host: nix::unistd::gethostname()
            .map_or_else(|_| local.clone(), |name| name.to_string_lossy().into_owned()),
        data_address: listener.address().to_owned(),
        device: "cpu".into(),
        memory_in_use: Arc::new(memory::in_use_now),
        ..SessionOptions::new(text("COX_COORDINATOR")?)
    };
    let trainer =
        PolicyTrainer::<Flex>::new(TrainerOptions { device: Default::default(), listener: Some(listener) });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime =
        runtime.map_err(|error| Failed::new(Exit::Internal, format!("cannot start tokio: {error}")))?;
    runtime.block_on(session::run(options, trainer)).map_err(|error| Failed::new(exit(&error), error))
}

fn exit(error: &SessionError) -> Exit {
    match error {
        SessionError::Refused { .. } => Exit::Rendezvous,
        SessionError::Lost { .. } => Exit::CoordinatorLost,
        SessionError::Aborted(_) => Exit::WorkerFailed,
        SessionError::Failed { kind, .. } => Exit::of_failure(*kind),
        SessionError::Protocol { .. } => Exit::Internal,
    }
}

fn text(name: &str) -> Result<String, Failed> {
    env::var(name).map_err(|_| {
        Failed::usage(format!(
            "{name} is not set: a worker is started by `cox run`, or alone with `cox worker --config CONFIG`"
        ))
    })
}

fn number(name: &str) -> Result<u32, Failed> {
    let value = text(name)?;
    value.parse().map_err(|_| Failed::usage(format!("{name}={value} is not a number")))
}
