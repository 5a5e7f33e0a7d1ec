//! How long a run will take: by earlier runs of its model on this machine, else by arithmetic.

use coxswain_proto::human;
use coxswain_worker::memory::prediction::recorded::RecordedRuns;
use serde::Serialize;

use super::capacity::Memory;
use crate::gpu::named::bfloat16_peak;

/// What a step is assumed to reach of a GPU's peak: an assumption, until a GPU has run it.
const SHARE_OF_PEAK: f64 = 0.35;

/// How long one step takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepTime {
    /// Seconds.
    pub seconds: f64,
    /// What that rests on.
    pub basis: TimeBasis,
}

/// What a step's time rests on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeBasis {
    /// So many earlier runs of this model on this machine.
    Runs(usize),
    /// Products alone, and a GPU's peak in floating-point operations a second.
    Peak(f64),
}

impl StepTime {
    /// The time of so many operations on a rank of such a world, in this memory; none where nothing is known
    /// of it.
    pub fn find(flops: f64, world: u64, memory: &Memory, recorded: Option<&RecordedRuns>) -> Option<Self> {
        let by_runs = recorded.and_then(|runs| runs.speed(world));
        let by_peak = || {
            let peak = bfloat16_peak(&memory.name).filter(|_| memory.is_gpu)?;
            Some((SHARE_OF_PEAK * peak, TimeBasis::Peak(peak)))
        };
        let (speed, basis) = by_runs.map(|(speed, runs)| (speed, TimeBasis::Runs(runs))).or_else(by_peak)?;
        Some(Self { seconds: flops / speed, basis })
    }

    /// What the time on a GPU that is not here rests on.
    pub fn assumption() -> String {
        format!("assume {:.0} % of each GPU's peak (not confirmed by measurement)", 100.0 * SHARE_OF_PEAK)
    }

    /// In words, with that of so many steps, and of an epoch of so many, where they are known.
    pub fn in_words(&self, steps: Option<u64>, epoch: Option<u64>) -> String {
        let of = |steps: u64| human::seconds(self.seconds * steps as f64);
        let epoch = epoch.map_or(String::new(), |steps| format!(", {} an epoch", of(steps)));
        let all = steps.map_or(String::new(), |steps| format!(", {} in all", of(steps)));
        let basis = match self.basis {
            TimeBasis::Runs(1) => "as in the last run of this model on this machine".to_owned(),
            TimeBasis::Runs(runs) => format!("as in {runs} earlier runs of this model on this machine"),
            TimeBasis::Peak(peak) => format!(
                "estimated: {:.0} % of {:.0} TFLOP/s (not confirmed by measurement)",
                100.0 * SHARE_OF_PEAK,
                peak / 1e12
            ),
        };
        let rate = 1.0 / self.seconds;
        let digits = if rate < 10.0 { 2 } else { 0 };
        format!("about {rate:.digits$} steps/s, {} a step{epoch}{all}: {basis}", of(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_says_what_it_rests_on() {
        let measured = StepTime { seconds: 0.5, basis: TimeBasis::Runs(3) };
        let told = measured.in_words(Some(7200), Some(240));
        assert!(
            told.starts_with("about 2.00 steps/s, 500 ms a step, 2m 00s an epoch, 1h 00m in all"),
            "{told}"
        );
        assert!(told.ends_with("as in 3 earlier runs of this model on this machine"), "{told}");
        let computed = StepTime { seconds: 0.1, basis: TimeBasis::Peak(312e12) };
        let told = computed.in_words(None, None);
        assert!(told.contains("35 % of 312 TFLOP/s") && !told.contains("in all"), "{told}");
    }
}
