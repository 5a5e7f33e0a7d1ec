//! `cox worker`: one process, one rank.
//!
//! Its place in the world comes from the environment that a launcher gives it (`launch::worker_env`). With
//! `--config` it needs neither launcher nor coordinator: a world of one.

mod solo;

use std::{path::PathBuf, sync::Arc};

use clap::Args;
use coxswain_identity::{Address, Whereabouts, claims::Claims};
use coxswain_proto::{
    ids::{Bytes, Rank},
    run_spec::DeviceChoice,
};
use coxswain_worker::{
    collective::RingListener,
    device::ChosenTrainer,
    memory,
    session::{self, SessionError, SessionOptions},
};

use super::{
    runtime::block_on,
    spec_args::{of_file, pin},
};
use crate::{
    credentials,
    exit::{CliError, Exit, Outcome},
    gpu::Sensors,
    launch::{
        data_place::DataPlace,
        inputs::{Env, SettingText, process_env},
        machine::LocalMachine,
        worker_env::{self, CLAIMS},
    },
    tasks::{chosen_device, tasks},
    threads,
};

/// Flags of `cox worker`.
#[derive(Args, Debug)]
pub struct WorkerArgs {
    /// Run file to train without a coordinator
    #[arg(long, value_name = "CONFIG")]
    config: Option<PathBuf>,
    /// Device: `cuda` (the GPU selected by LOCAL_RANK), `cpu`, or `auto` [default: COX_DEVICE, or
    /// launch.device]
    #[arg(long, value_name = "auto|cpu|cuda")]
    device: Option<String>,
    /// Overrides of the configuration: section.key=value
    #[arg(value_name = "KEY=VALUE", requires = "config")]
    overrides: Vec<String>,
}

/// Threads of a worker beside those that compute: the trainer's, readers, and those that wait for files.
const THREADS: usize = 8;

/// Trains this rank's part of a run.
pub fn execute(args: &WorkerArgs) -> Outcome {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    threads::require(worker_env::threads(&process_env, None, cores, 1) + THREADS)?;
    if let Some(config) = &args.config {
        let mut spec = of_file(config, &args.overrides)?;
        pin(&mut spec)?;
        let wanted = args.device(&process_env)?.unwrap_or(spec.launch.device);
        chosen_device(wanted)?;
        return solo::train(&spec, ChosenTrainer::new(tasks(), Some(wanted), 0, None));
    }
    let slot = Slot::from_env(&process_env)?;
    let wanted = args.device(&process_env)?;
    // A GPU that was asked for and cannot be used ends a worker before it has registered.
    wanted.map(chosen_device).transpose()?;
    // A world of one has no ring, but every worker registers where it could be called.
    let address = Address::of(&slot.local_addr, slot.data.port);
    let listener =
        RingListener::bind(address.host_port()).map_err(|error| CliError::new(Exit::Rendezvous, error))?;
    let listener = listener.with_shared_memory(process_env("COX_RING_SHARED_MEMORY").as_deref() != Some("0"));
    let credentials = credentials::of_env(&process_env)?;
    let listener = listener.with_tokens(credentials.tokens().cloned());
    let options = SessionOptions {
        endpoint: slot.whereabouts(),
        credentials,
        run_id: process_env("TORCHELASTIC_RUN_ID").unwrap_or_default(),
        rank: Rank(slot.rank),
        local_rank: slot.local_rank,
        node_rank: slot.node_rank,
        world_size: slot.world_size,
        host: LocalMachine::this().host,
        data_address: slot.data.advertise.unwrap_or_else(|| listener.address().to_owned()),
        memory_in_use: Arc::new(|| Bytes(memory::in_use())),
        driver: Some(Arc::new(Sensors::new(process_env("CUDA_VISIBLE_DEVICES")))),
        ..SessionOptions::new(&slot.coordinator)
    };
    let local_rank = usize::try_from(slot.local_rank).unwrap_or(0);
    let trainer = ChosenTrainer::new(tasks(), wanted, local_rank, Some(listener));
    block_on(session::run(options, trainer)).map_err(|error| {
        let exit = match &error {
            SessionError::Refused { .. } => Exit::Rendezvous,
            SessionError::Lost { .. } => Exit::CoordinatorLost,
            SessionError::Aborted(_) => Exit::WorkerFailed,
            SessionError::Failed { kind, .. } => Exit::of_failure(*kind),
            SessionError::Protocol { .. } => Exit::Internal,
        };
        CliError::new(exit, error)
    })
}

impl WorkerArgs {
    /// What the command line or the launcher says; the run file has the last word where neither does.
    fn device(&self, env: Env<'_>) -> Result<Option<DeviceChoice>, CliError> {
        let flag = self.device.as_ref();
        let given = flag.map(|text| SettingText { text: text.clone(), source: "--device".to_owned() });
        let given = given.or_else(|| SettingText::variable("COX_DEVICE", env));
        given.map(|given| given.parse("auto, cpu or cuda")).transpose()
    }
}

/// A worker's place, from `torchrun`'s variables.
#[derive(Debug, PartialEq, Eq)]
struct Slot {
    coordinator: String,
    /// Where its successors are announced, and the number that it has itself.
    claims: Option<(PathBuf, u64)>,
    rank: u32,
    local_rank: u32,
    node_rank: u32,
    world_size: u32,
    local_addr: String,
    data: DataPlace,
}

impl Slot {
    fn from_env(env: Env<'_>) -> Result<Self, CliError> {
        let master =
            || Some(Address::of(&env("MASTER_ADDR")?, env("MASTER_PORT")?.parse().ok()?).to_string());

        let coordinator = env("COX_COORDINATOR").or_else(master).ok_or_else(|| {
            CliError::usage("no coordinator: start workers with `cox run`, set COX_COORDINATOR, or train without one with --config")
        })?;
        let number = |name: &str, absent: u32| match SettingText::variable(name, env) {
            Some(given) => given.parse("a whole number"),
            None => Ok(absent),
        };
        let world_size = number("WORLD_SIZE", 1)?;
        let rank = number("RANK", 0)?;
        if rank >= world_size {
            return Err(CliError::usage(format!("RANK {rank}: must be less than WORLD_SIZE ({world_size})")));
        }
        let local_rank = number("LOCAL_RANK", rank)?;
        let claims = env(CLAIMS).map(|text| announced(&text)).transpose()?;
        Ok(Self {
            coordinator,
            claims,
            rank,
            local_rank,
            node_rank: number("GROUP_RANK", 0)?,
            world_size,
            local_addr: env("COX_LOCAL_ADDR").unwrap_or_else(|| "127.0.0.1".to_owned()),
            data: DataPlace::from_env(env, local_rank)?,
        })
    }
}

impl Slot {
    /// Where this worker calls the coordinator.
    fn whereabouts(&self) -> Whereabouts {
        let address = Address::parse(&self.coordinator);
        match &self.claims {
            None => Whereabouts::fixed(address),
            Some((dir, number)) => Whereabouts::until_moved(address, Claims::at(dir.clone()), *number),
        }
    }
}

/// The number of a coordinator and the directory of its successors, from `NUMBER:DIR`.
fn announced(text: &str) -> Result<(PathBuf, u64), CliError> {
    let parts = text.split_once(':').and_then(|(number, dir)| Some((dir.into(), number.parse().ok()?)));
    parts.ok_or_else(|| CliError::usage(format!("{CLAIMS} {text}: expected NUMBER:DIR, as launchers set it")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(variables: &[(&str, &str)]) -> Result<Slot, String> {
        let env = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Slot::from_env(&env).map_err(|failed| failed.message.unwrap())
    }

    #[test]
    fn a_worker_finds_its_place_in_the_environment() {
        let variables = [
            ("COX_COORDINATOR", "n3:29400"),
            ("RANK", "3"),
            ("LOCAL_RANK", "1"),
            ("GROUP_RANK", "1"),
            ("WORLD_SIZE", "4"),
            ("COX_LOCAL_ADDR", "10.0.0.4"),
        ];
        let expected = Slot {
            coordinator: "n3:29400".into(),
            claims: None,
            rank: 3,
            local_rank: 1,
            node_rank: 1,
            world_size: 4,
            local_addr: "10.0.0.4".into(),
            data: DataPlace { port: 0, advertise: None },
        };
        assert_eq!(slot(&variables), Ok(expected));
        assert_eq!(slot(&[("MASTER_ADDR", "n3"), ("MASTER_PORT", "7")]).unwrap().coordinator, "n3:7");
    }

    #[test]
    fn a_flag_beats_the_launchers_word_on_the_device() {
        let env = |name: &str| (name == "COX_DEVICE").then(|| "cpu".to_owned());
        let args = |device: Option<&str>| WorkerArgs {
            config: None,
            device: device.map(str::to_owned),
            overrides: Vec::new(),
        };
        assert_eq!(args(Some("cuda")).device(&env).unwrap(), Some(DeviceChoice::Cuda));
        assert_eq!(args(None).device(&env).unwrap(), Some(DeviceChoice::Cpu));
        assert_eq!(args(None).device(&|_| None).unwrap(), None);
        let error = args(Some("gpu")).device(&env).unwrap_err().message.unwrap();
        assert_eq!(error, "--device gpu: expected auto, cpu or cuda");
    }

    #[test]
    fn a_place_that_cannot_be_is_refused() {
        assert!(slot(&[]).unwrap_err().starts_with("no coordinator"));
        let beyond = slot(&[("COX_COORDINATOR", "a:1"), ("RANK", "2"), ("WORLD_SIZE", "2")]).unwrap_err();
        assert_eq!(beyond, "RANK 2: must be less than WORLD_SIZE (2)");
        let text = slot(&[("COX_COORDINATOR", "a:1"), ("COX_COORDINATOR_CLAIMS", "here")]).unwrap_err();
        assert!(text.starts_with("COX_COORDINATOR_CLAIMS here: expected NUMBER:DIR"), "{text}");
        let text = slot(&[("COX_COORDINATOR", "a:1"), ("WORLD_SIZE", "two")]).unwrap_err();
        assert_eq!(text, "WORLD_SIZE two: expected a whole number");
    }
}
