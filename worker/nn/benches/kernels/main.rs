//! Speed of the fused CPU operations, of a decoder layer and of a language model made of them, next to
//! PyTorch.
//!
//! ```text
//! RAYON_NUM_THREADS=2 cargo bench -p coxswain-nn --bench kernels -- [--torch PYTHON] [--cpu] [FILTER]
//! ```
//!
//! Without `--torch` only our own times are printed. With it, `torch_peer.py` runs beside this process
//! (torch, transformers and peft must be installed there) and the two take turns, round by round, so that
//! whatever else the machine does falls on both. `--cpu` counts the time both processes compute instead of
//! the time that passes: with one thread, that is what can be compared on a machine that does other work,
//! too. Sizes are those of the `small` preset: 12 layers of 768, 12 query and 4 key heads, 2 x 192 tokens,
//! LoRA of rank 16 on all seven projections, float32. Printed are medians in milliseconds and the ratio ours
//! / theirs; below 1 is faster.

mod cases;
mod decoder;
mod peer;

use std::time::{Duration, Instant};

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};
use peer::Peer;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Turns that each side takes.
const ROUNDS: usize = 7;
/// How long one turn of one side lasts at least.
const ROUND: Duration = Duration::from_millis(150);

fn main() {
    let mut filter = String::new();
    let mut python = None;
    let mut clock = Clock::Wall;
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--bench" => {}
            "--cpu" => clock = Clock::Cpu,
            "--torch" => python = arguments.next(),
            _ => filter = argument,
        }
    }
    // This thread counts as one of the pool, as the trainer's does.
    let threads = coxswain_nn::kernels::pool::join();
    let mut peer = python.map(|python| Peer::start(&python, threads, clock));
    println!("{threads} threads, medians of {ROUNDS} turns in ms (fastest in brackets)\n");
    println!("{:<34} {:>19} {:>19} {:>7}", "", "coxswain", "torch", "ratio");
    for case in cases::all().into_iter().filter(|case| case.name.contains(&filter)) {
        let (ours, theirs) = take_turns(&case, peer.as_mut(), clock);
        let (ours, fastest) = median(ours);
        print!("{:<34} {ours:>10.3} ({fastest:>6.2})", case.name);
        if let Some((theirs, fastest)) = theirs.map(median) {
            print!(" {theirs:>10.3} ({fastest:>6.2}) {:>7.2}", ours / theirs);
        }
        println!();
    }
}

/// What is counted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Clock {
    /// Time that passes.
    Wall,
    /// Time that this process computes, on all threads.
    Cpu,
}

impl Clock {
    fn milliseconds(self, since: Instant) -> f64 {
        match self {
            Self::Wall => since.elapsed().as_secs_f64() * 1e3,
            Self::Cpu => {
                let usage = getrusage(UsageWho::RUSAGE_SELF).expect("the kernel counts");
                (usage.user_time() + usage.system_time()).num_microseconds() as f64 * 1e-3
            }
        }
    }
}

/// One operation: its name is what the peer knows it by.
struct Case {
    name: &'static str,
    run: Box<dyn Fn()>,
}

fn take_turns(case: &Case, mut peer: Option<&mut Peer>, clock: Clock) -> (Vec<f64>, Option<Vec<f64>>) {
    (case.run)();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let round = Instant::now();
        while round.elapsed() < ROUND {
            let start = clock.milliseconds(round);
            (case.run)();
            ours.push(clock.milliseconds(round) - start);
        }
        if let Some(peer) = peer.as_mut() {
            theirs.extend(peer.run(case.name, ROUND));
        }
    }
    (ours, peer.map(|_| theirs))
}

fn median(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}
