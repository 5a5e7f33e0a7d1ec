//! Worlds that mix CPUs and GPUs by mistake.
//!
//! With `launch.device: auto` a machine whose driver is broken computes on its CPU, and everybody else waits
//! for it in every step, a hundred times as long as for a GPU. Such a world is refused when it forms, by all
//! of its ranks alike. A rank that was told to use its CPU is meant to, whatever the others have.

use super::CollectiveError;

/// What a rank computes on, and whether it was meant to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Computes {
    /// On the CPU, because it was told to.
    #[default]
    OnCpu,
    /// On the CPU, because no GPU was found that can be used.
    OnCpuForWantOfGpu,
    /// On a GPU.
    OnGpu,
}

impl Computes {
    /// As a number that ranks exchange.
    pub(super) fn code(self) -> f64 {
        f64::from(self as u8)
    }

    /// The other way.
    pub(super) fn of_code(code: f64) -> Self {
        let known = [Self::OnCpu, Self::OnCpuForWantOfGpu, Self::OnGpu];
        known.into_iter().find(|known| known.code() == code).unwrap_or_default()
    }
}

/// Refuses a world, by rank, in which some compute on GPUs and others would have, too.
pub(super) fn refuse(all: &[Computes]) -> Result<(), CollectiveError> {
    let stranded = which(all, Computes::OnCpuForWantOfGpu);
    let on_gpus = which(all, Computes::OnGpu);
    if stranded.is_empty() || on_gpus.is_empty() {
        return Ok(());
    }
    Err(CollectiveError::MixedDevices { stranded: named(&stranded), on_gpus: named(&on_gpus) })
}

fn which(all: &[Computes], wanted: Computes) -> Vec<usize> {
    (0..all.len()).filter(|rank| all[*rank] == wanted).collect()
}

/// `rank 1`, `ranks 0, 2`.
pub(super) fn named(ranks: &[usize]) -> String {
    let numbers: Vec<_> = ranks.iter().map(ToString::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, numbers.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_rank_that_wanted_a_gpu_and_has_none_makes_a_mixture() {
        use Computes::{OnCpu, OnCpuForWantOfGpu as Stranded, OnGpu};
        for fine in [&[OnGpu, OnGpu][..], &[Stranded, Stranded], &[OnCpu, OnGpu], &[OnCpu, Stranded]] {
            assert!(refuse(fine).is_ok(), "{fine:?}");
        }
        let refused = refuse(&[OnGpu, Stranded, OnCpu, Stranded]).expect_err("a mixture").to_string();
        for part in ["ranks 1, 3", "rank 0", "cox selftest", "--device cpu"] {
            assert!(refused.contains(part), "{part}: {refused}");
        }
        for computes in [OnGpu, OnCpu, Stranded] {
            assert_eq!(Computes::of_code(computes.code()), computes);
        }
    }
}
