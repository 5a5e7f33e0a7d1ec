//! One rank in a process of its own: this test binary again, told who it is by its environment and what to do
//! by its stdin.
//!
//! ```text
//! parent                                       rank
//!                                        ◀──   at ADDRESS
//! suite GENERATION COUNT ADDRESS,..      ──▶   the first COUNT behaviours, each in a generation of its own
//!                                        ◀──   seen NAME ..  done
//! endure GENERATION ADDRESS,..           ──▶   all-reduces until one fails
//!                                        ◀──   moving  ended WHY
//! ```
//!
//! Answers begin with [`MARK`]: what the test runner and NCCL print goes past them.

use std::{
    io::{BufRead, stdin},
    time::{Duration, Instant},
};

use burn_cuda::{Cuda, CudaDevice};
use coxswain_cuda::NVIDIA;
use coxswain_nn::kernels::flat::{Flat, OnDevice};
use coxswain_proto::{
    ids::{Generation, Rank},
    run_spec::Collectives,
};
use coxswain_worker::{
    collective::{
        self, Brings, BufMut, Collective, CollectiveError, Computes, Membership, Reduce, Ring, RingAbort,
        RingListener,
        conformance::{self, Behaviour},
    },
    device::Accelerator,
};

/// Names the environment variable `RANK WORLD ring|nccl` of such a process.
pub const SLOT: &str = "COX_TEST_SLOT";
/// The test below.
pub const TEST: &str = "rank::a_rank_that_its_parent_started_does_as_it_is_told";
/// Before every answer.
pub const MARK: &str = "@@ ";
/// How long a rank looks for the others.
const PATIENCE: Duration = Duration::from_secs(60);
/// What a rank has seen whose buffers are tensors on the GPU.
pub const ON_GPU: &str = "buffers on the GPU go every way, where they lie, after all that was done to them";
/// More behaviours than there are: the generation after theirs.
const LAST: u64 = 100;
/// How often a buffer is written before it is moved, and its elements: long enough on a GPU that the transfer
/// is asked for while it works, and a transfer that did not wait would be overwritten.
const WRITTEN: usize = 16;
const WRITTEN_TO: usize = 16 << 20;
/// Elements that are moved until somebody is lost: 16 MiB.
const ENDURED: usize = 4 << 20;

struct RankProcess {
    rank: usize,
    world: usize,
    over: Collectives,
    listener: RingListener,
}

impl RankProcess {
    fn from_environment() -> Option<Self> {
        let slot = std::env::var(SLOT).ok()?;
        let parts: Vec<&str> = slot.split(' ').collect();
        let number = |at: usize| parts[at].parse::<usize>().expect("a number");
        let over = if parts[2] == "nccl" { Collectives::Nccl } else { Collectives::Ring };
        let listener = RingListener::bind("127.0.0.1:0").expect("loopback has free ports");
        Some(Self { rank: number(0), world: number(1), over, listener })
    }

    /// Joins the others in a generation.
    fn join(&self, generation: u64, addresses: &[String]) -> Result<Box<dyn Collective>, CollectiveError> {
        let deadline = Instant::now() + PATIENCE;
        let membership = Membership::among("test", Generation(generation), Rank(self.rank as u32), addresses);
        let ring = Ring::connect(&self.listener, &membership, deadline, &RingAbort::new())?;
        let gpus = NVIDIA.probe().map_or(1, |gpus| gpus.count);
        let over_nccl = self.over == Collectives::Nccl;
        let mut source = over_nccl.then(|| NVIDIA.on_gpu().transport(self.rank % gpus));
        let source = source.as_mut().map(|source| source.as_mut());
        collective::join(ring, self.over, Brings { computes: Computes::default(), source, deadline })
    }

    fn suite(&self, generation: u64, count: usize, addresses: &[String]) {
        let behaviours = Behaviour::of_world(self.world, self.over == Collectives::Ring).take(count);
        for (behaviour, generation) in behaviours.zip(generation..) {
            let seen = self.join(generation, addresses).map_err(|error| error.to_string());
            let seen = seen.and_then(|mut comm| behaviour.run(comm.as_mut()).map_err(|it| it.to_string()));
            match seen {
                Ok(true) => say(format_args!("seen {}", behaviour.name)),
                Ok(false) => {}
                Err(why) => return say(format_args!("failed {}: {why}", behaviour.name)),
            }
        }
        if self.over == Collectives::Nccl && count == usize::MAX {
            match self.on_gpu(generation + LAST, addresses) {
                Ok(()) => say(format_args!("seen {ON_GPU}")),
                Err(why) => return say(format_args!("failed {ON_GPU}: {why}")),
            }
        }
        say("done");
    }

    /// What only the crate that knows a GPU can show.
    fn on_gpu(&self, generation: u64, addresses: &[String]) -> Result<(), String> {
        let gpus = NVIDIA.probe().map_or(1, |gpus| gpus.count);
        let mut comm = self.join(generation, addresses).map_err(|error| error.to_string())?;
        let gpu = CudaDevice::new(self.rank % gpus);
        let seen = conformance::on_device::<OnDevice<Cuda>>(comm.as_mut(), &gpu);
        seen.map_err(|violation| violation.to_string())?;
        after_everything(comm.as_mut(), &gpu)
    }

    fn endure(&self, generation: u64, addresses: &[String]) {
        let mut comm = match self.join(generation, addresses) {
            Ok(comm) => comm,
            Err(error) => return say(format_args!("failed to join: {error}")),
        };
        let mut buffer = vec![0.0f32; ENDURED];
        for round in 0.. {
            match comm.all_reduce(BufMut::F32(&mut buffer), Reduce::Max) {
                Ok(()) if round == 0 => say("moving"),
                Ok(()) => {}
                Err(error) => return say(format_args!("ended {error}")),
            }
        }
    }
}

/// A transfer is asked for while the GPU still writes what is to be moved.
fn after_everything(comm: &mut dyn Collective, gpu: &CudaDevice) -> Result<(), String> {
    let mut flat = OnDevice::<Cuda>::of(gpu, vec![1.0; WRITTEN_TO]);
    let mut ones = <OnDevice<Cuda> as Flat>::Halves::default();
    flat.narrow(&mut ones);
    for _ in 0..WRITTEN {
        flat.clear(0..WRITTEN_TO);
        flat.widen(&ones, 0..WRITTEN_TO);
    }
    comm.all_reduce(flat.lend().into(), Reduce::Sum).map_err(|error| error.to_string())?;
    let due = comm.world() as f32;
    let wrong = flat.read(0..WRITTEN_TO).iter().filter(|found| **found != due).count();
    if wrong == 0 {
        Ok(())
    } else {
        Err(format!("{wrong} of {WRITTEN_TO} sums are not of what was written last"))
    }
}

fn say(what: impl std::fmt::Display) {
    // The runner has begun a line of its own.
    println!("\n{MARK}{what}");
}

#[test]
fn a_rank_that_its_parent_started_does_as_it_is_told() {
    let Some(slot) = RankProcess::from_environment() else { return };
    say(format_args!("at {}", slot.listener.address()));
    for line in stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let generation = words[1].parse().expect("a generation");
        let addresses: Vec<String> = words[words.len() - 1].split(',').map(ToOwned::to_owned).collect();
        match words[0] {
            "suite" => slot.suite(generation, words[2].parse().expect("a count"), &addresses),
            _ => slot.endure(generation, &addresses),
        }
    }
}
