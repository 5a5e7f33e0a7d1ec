//! News as finished lines: aligned, so that a column can be read downwards.

use std::{fmt::Write, time::Duration};

use coxswain_proto::{human, ids::Step, limits, report::stage_times};

use crate::core::{
    failure::Failure,
    quarantine::{BadSample, SampleVerdict},
    report::{CommittedStep, Skip},
    slot_health::SlotHealth,
    stragglers::Slowness,
};

/// `  12/400  epoch 0  loss 0.8123  grad 1.234  lr 1.00e-4  12.3 samples/s 4100 tokens/s 480 ms (ms: data 2,
///                                                          ...) 512.0 MiB on rank 1`.
pub fn step(step: &CommittedStep) -> String {
    let total = step.total_steps.to_string();
    let width = total.len();
    let mut line = format!(
        "{:>width$}/{total}  epoch {}  loss {:<8}  grad {:<8}  lr {:.2e}",
        step.step.0 + 1,
        step.consumed.epoch,
        real(step.totals.loss()),
        real(step.totals.grad_norm),
        step.learning_rate().unwrap_or_default(),
    );
    let speed = (human::count(step.samples_per_second()), human::count(step.tokens_per_second()));
    write!(line, "  {:>5} samples/s  {:>6} tokens/s", speed.0, speed.1).expect("strings take everything");
    write!(line, "  {:>8}", human::time(step.times.total)).expect("strings take everything");
    write!(line, " ({})", split(step)).expect("strings take everything");
    if step.cache_generation > 0 {
        let (hits, all) = (step.cache.hits, step.cache.hits + step.cache.misses);
        write!(line, "  cache {}: {hits} of {all}", step.cache_generation).expect("strings take everything");
    }
    write!(line, "  {:>10} on rank {}", human::bytes(step.memory_peak.bytes.0), step.memory_peak.slot)
        .expect("strings take everything");
    line
}

/// `  12/400  epoch 0  left out: its loss was not finite in either of two attempts (sample 17)`.
pub fn skipped(step: &CommittedStep, why: &Skip) -> String {
    let total = step.total_steps.to_string();
    let width = total.len();
    format!("{:>width$}/{total}  epoch {}  left out: {why}", step.step.0 + 1, step.consumed.epoch)
}

/// Parts of a step in milliseconds, those that took no time left out.
fn split(step: &CommittedStep) -> String {
    const LEAST_MS: f64 = 0.05;
    let ms = |time: Duration| 1e3 * time.as_secs_f64();
    let times = &step.times;
    let stages = stage_times(&step.metrics).map(|(stage, seconds)| (stage, 1e3 * seconds));
    let parts = [("data", ms(times.data))]
        .into_iter()
        .chain(stages)
        .chain([("optimizer", ms(times.optimizer)), ("comm", ms(times.communication))]);
    let told = parts.filter(|(_, ms)| *ms >= LEAST_MS).map(|(name, ms)| match ms < 9.95 {
        true => format!("{name} {ms:.1}"),
        false => format!("{name} {ms:.0}"),
    });
    let told: Vec<_> = told.collect();
    if told.is_empty() { "ms".into() } else { format!("ms: {}", told.join(", ")) }
}

/// Five significant digits: `0.81230`, `12.346`, `1.23e-7`.
fn real(value: f64) -> String {
    match value.abs() {
        v if v != 0.0 && !(1e-3..1e5).contains(&v) => format!("{value:.2e}"),
        v if v < 1.0 => format!("{value:.5}"),
        v if v < 10.0 => format!("{value:.4}"),
        v if v < 100.0 => format!("{value:.3}"),
        _ => format!("{value:.2}"),
    }
}

/// `rolled back from step 57 to 40: 17 committed steps are repeated`.
pub fn rolled_back(from: Step, to: Step) -> String {
    let repeated = match from.0.saturating_sub(to.0) {
        1 => "1 committed step is repeated".to_owned(),
        lost => format!("{lost} committed steps are repeated"),
    };
    format!("rolled back from step {from} to {to}: {repeated}")
}

/// `ranks 0, 2`.
pub fn ranks(ranks: &[u32]) -> String {
    let told: Vec<_> = ranks.iter().take(8).map(u32::to_string).collect();
    let more = if ranks.len() > told.len() { ", ..." } else { "" };
    format!("{} {}{more}", if ranks.len() == 1 { "rank" } else { "ranks" }, told.join(", "))
}

/// What is told of a rank: `is slow: 1.31 times the time of the other ranks ...`, or that it keeps up again.
pub fn slow(slow: Option<&Slowness>) -> String {
    match slow {
        Some(slow) => format!("is slow: {slow}"),
        None => "is no longer slow".to_owned(),
    }
}

/// What is told of a slow rank that is replaced: `gives its place to a spare: it is slow, 1.31 times ...`.
pub fn set_aside(slow: &Slowness) -> String {
    format!("is slow and is replaced by a spare (faults.replace_slow): it takes {slow}")
}

/// What is told of a slot that is not used any more: `is cordoned after 2 hardware faults ...`.
pub fn cordoned(health: &SlotHealth) -> String {
    format!(
        "is cordoned after {} hardware fault{}: no process is started there until its node is restarted; the last one: {}",
        health.faults,
        if health.faults == 1 { "" } else { "s" },
        one_line(&health.newest)
    )
}

/// Line breaks of a foreign error become ` | `.
pub fn one_line(text: &str) -> String {
    let parts: Vec<_> = text.lines().map(str::trim).filter(|part| !part.is_empty()).collect();
    parts.join(" | ")
}

/// A sample that failed, and what follows: `the sample at position 4 of epoch 0 (row 17 of the data set)
/// failed on rank 1; another worker tries it: MESSAGE`.
pub fn sample(at: &BadSample, verdict: SampleVerdict, failure: &Failure) -> String {
    let rank = failure.slot.map_or_else(String::new, |slot| format!(" on rank {slot}"));
    let follows = match verdict {
        SampleVerdict::TryAnother => "another worker tries it".to_owned(),
        SampleVerdict::LeftOut => "left out from now on (quarantined)".to_owned(),
        SampleVerdict::WorkerAtFault => "rows fail on this rank only: it cannot read its data".to_owned(),
        SampleVerdict::TooMany => {
            format!("more than {} rows are quarantined: repair the data set", limits::MAX_QUARANTINED)
        }
    };
    one_line(&format!("{at} failed{rank}; {follows}: {}", failure.message))
}

#[cfg(test)]
mod tests {
    use coxswain_proto::ids::{Bytes, Generation, Slot, Step};

    use super::*;
    use crate::core::report::{CacheUse, DataConsumption, MemoryPeak, Metric, StepTimes, Totals};

    fn committed(number: u64, loss: f64) -> CommittedStep {
        CommittedStep {
            step: Step(number),
            total_steps: 400,
            consumed: DataConsumption { epoch: 0, positions: 0..8, left_out: Vec::new() },
            generation: Generation(1),
            world: 2,
            totals: Totals { loss_sum: loss * 64.0, valid_count: 64.0, grad_norm: 1.25 },
            times: StepTimes { total: Duration::from_millis(480), ..StepTimes::default() },
            metrics: vec![
                Metric::stage_time("vision", Duration::from_millis(120)),
                Metric::stage_time("language", Duration::from_micros(4200)),
                Metric::stage_time("too-short", Duration::from_micros(49)),
                Metric::learning_rate("head", 1e-4),
                Metric::learning_rate("lora", 1e-5),
            ],
            tokens: 2048,
            memory_peak: MemoryPeak { bytes: Bytes(512 << 20), slot: Slot(1) },
            retries: 0,
            cache_generation: 0,
            cache: CacheUse::default(),
            reports: 2,
            skipped: None,
        }
    }

    #[test]
    fn a_step_is_one_aligned_line() {
        assert_eq!(
            step(&committed(8, 0.8123)),
            "  9/400  epoch 0  loss 0.81230   grad 1.2500    lr 1.00e-4   16.7 samples/s    4267 tokens/s    480 ms \
             (ms: vision 120, language 4.2)   512.0 MiB on rank 1"
        );
        assert_eq!(step(&committed(98, 0.5)).find("samples"), step(&committed(9, 12.5)).find("samples"));
        let cache = CacheUse { hits: 6, misses: 2, ..CacheUse::default() };
        let served = CommittedStep { cache_generation: 3, cache, ..committed(8, 0.5) };
        assert!(step(&served).contains("  cache 3: 6 of 8  "), "{}", step(&served));
    }

    #[test]
    fn an_error_of_many_lines_becomes_one() {
        assert_eq!(one_line("cannot read:\n  no such file\n\n"), "cannot read: | no such file");
    }
}
