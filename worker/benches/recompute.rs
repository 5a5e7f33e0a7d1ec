//! What each recompute mode saves and costs: peak bytes of activations (exact, from the counting allocator)
//! and time of one forward and backward pass of the language model under LoRA. The vision tower has no part
//! in it and the expert is too small to count.
//!
//! ```text
//! cargo bench --bench recompute -- [--layers 12] [--width 768] [--inner 2048] [--rows 2] [--tokens 192]
//!     [--rank 16] [--rounds 5]
//! python integration-tests/bench/recompute_vs_torch.py        the same next to torch.utils.checkpoint
//! ```
//!
//! Rows marked `bf16` keep activations in bfloat16 (`model.activations_dtype`): their gradients are held
//! against `none, bf16`, whose numbers are other than those of `none`.
//!
//! Modes take turns, round by round, so that all see the same machine. Activations: the peak during the pass
//! less what was in use before it (weights, trainables, gradient buffer). Processor time is given beside the
//! clock's, since it suffers less from neighbours. Prints one line of JSON a mode, then a table.
//! `MIMALLOC_PURGE_DELAY=-1` keeps freed memory, as the launcher has it for workers. Without arguments it
//! runs at a size that takes seconds.

mod support {
    pub mod synthetic;
}

use coxswain_tasks::vla_flow::config::VlaSpec;
use std::time::Instant;

use anyhow::{Context, Result};
use burn::backend::Flex;
use coxswain_models::families::shelf;
use coxswain_nn::dtypes::ActivationsDtype;
use coxswain_nn::params::{FlatGrads, Trainables};
use coxswain_task::StageClock;
use coxswain_tasks::vla_flow::policy::Policy;
use coxswain_worker::{
    link::Phase,
    memory::{CountingAllocator, Meter, in_use},
};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeVal,
};
use serde_json::{Value, json};
use support::synthetic::{DIMS, TextStack, spec, text_batch};

#[global_allocator]
static ALLOCATOR: CountingAllocator<mimalloc::MiMalloc> = CountingAllocator(mimalloc::MiMalloc);

fn number(name: &str, default: usize) -> Result<usize> {
    let arguments: Vec<String> = std::env::args().collect();
    let at = arguments.iter().position(|argument| argument == name).and_then(|at| arguments.get(at + 1));
    at.map_or(Ok(default), |value| value.parse().with_context(|| format!("{name} wants a number")))
}

struct Mode {
    name: &'static str,
    activations: ActivationsDtype,
    policy: Policy<Flex>,
    milliseconds: Vec<f64>,
    processor_ms: Vec<f64>,
    peak: u64,
    bits: Vec<u32>,
}

fn main() -> Result<()> {
    let full_size = std::env::args().any(|argument| argument.starts_with("--") && argument != "--bench");
    let small = |large, small| if full_size { large } else { small };
    let stack = TextStack {
        layers: number("--layers", 12)?,
        width: number("--width", small(768, 192))?,
        inner: number("--inner", small(2048, 512))?,
    };
    let (rows, tokens) = (number("--rows", 2)?, number("--tokens", 192)?);
    let rounds = number("--rounds", 5)?;
    let dir = tempfile::tempdir()?;
    stack.write(dir.path())?;

    let named = [
        ("none", json!("none"), ActivationsDtype::Float32),
        ("selective", json!("selective"), ActivationsDtype::Float32),
        ("full", json!("full"), ActivationsDtype::Float32),
        ("every: 2", json!({"every": 2}), ActivationsDtype::Float32),
        ("none, bf16", json!("none"), ActivationsDtype::Bfloat16),
        ("selective, bf16", json!("selective"), ActivationsDtype::Bfloat16),
        ("full, bf16", json!("full"), ActivationsDtype::Bfloat16),
    ];
    let (mut modes, mut trainables) = (Vec::new(), None);
    for (name, mode, activations) in named {
        let mut spec = spec(dir.path(), number("--rank", 16)?, &mode)?;
        spec.vla_mut().model.activations_dtype = activations;
        let (policy, layout, values) = Policy::<Flex>::load(&spec, shelf(), DIMS, &Default::default())?;
        trainables.get_or_insert_with(|| Trainables::<Flex>::new(layout, values, &Default::default()));
        modes.push(Mode {
            name,
            activations,
            policy,
            milliseconds: vec![],
            processor_ms: vec![],
            peak: 0,
            bits: vec![],
        });
    }
    let trainables = trainables.context("there are modes")?;
    let mut grads = FlatGrads::new(trainables.layout().len());
    let mut meter = Meter::new(Phase::Forward, None);
    for round in 0..=rounds {
        for mode in &mut modes {
            let batch = text_batch(rows, tokens, 7);
            grads.zero();
            meter.take_step_peak();
            let (before, begin, busy) = (in_use(), Instant::now(), processor_ms()?);
            mode.policy.forward_backward(&trainables, &batch, &mut grads, &mut StageClock::default())?;
            let (elapsed, busy) = (begin.elapsed().as_secs_f64() * 1e3, processor_ms()? - busy);
            mode.peak = meter.take_step_peak().0.saturating_sub(before);
            mode.bits = grads.values().iter().map(|value| value.to_bits()).collect();
            if round > 0 {
                mode.milliseconds.push(elapsed);
                mode.processor_ms.push(busy);
            }
        }
    }
    report(&modes);
    Ok(())
}

/// Time on processors of all threads of this process so far.
fn processor_ms() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let ms = |time: TimeVal| time.tv_sec() as f64 * 1e3 + time.tv_usec() as f64 / 1e3;
    Ok(ms(usage.user_time()) + ms(usage.system_time()))
}

/// Each round's ratio has both times from the same seconds of the machine.
fn more(times: &[f64], without: &[f64]) -> f64 {
    median(times.iter().zip(without).map(|(time, without)| time / without).collect()) - 1.0
}

fn report(modes: &[Mode]) {
    let none = &modes[0];
    let row = |mode: &Mode| {
        let alike = modes.iter().find(|other| other.activations == mode.activations).unwrap_or(none);
        assert!(mode.bits == alike.bits, "{}: another gradient than without recompute", mode.name);
        json!({
            "mode": mode.name,
            "activation_peak_mib": mode.peak as f64 / f64::from(1 << 20),
            "cut": 1.0 - mode.peak as f64 / none.peak as f64,
            "median_ms": median(mode.milliseconds.clone()),
            "more_time": more(&mode.milliseconds, &none.milliseconds),
            "more_processor_time": more(&mode.processor_ms, &none.processor_ms),
        })
    };
    let rows: Vec<Value> = modes.iter().map(row).collect();
    rows.iter().for_each(|row| println!("{row}"));
    println!("mode             peak MiB     cut     ms  more time  more processor time");
    for row in &rows {
        let of = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        let [cut, more, busy] = ["cut", "more_time", "more_processor_time"].map(|key| 100.0 * of(key));
        let (peak, ms) = (of("activation_peak_mib"), of("median_ms"));
        let name = row["mode"].as_str().unwrap_or_default();
        println!("{name:<15} {peak:>9.1} {cut:>6.1}% {ms:>6.0} {more:>9.1}% {busy:>19.1}%");
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
