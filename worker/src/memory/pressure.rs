//! Thrash: memory that is not exhausted, but so short that the system keeps moving this process's pages to
//! swap.
//!
//! An allocator that retries, or a kernel that swaps, never fails; the run just becomes ten times slower.
//! Swapped bytes that rise by more than a little in several steps in a row are therefore treated as an
//! out-of-memory that has not happened yet: the micro-batch is halved after the step. One step of swapping is
//! a neighbour's doing and means nothing.
//!
//! Page-cache reclaim and major faults of mapped files are not counted: streaming data and mapped weights
//! cause both in health.

/// Steps in a row that must swap.
const STEPS: u32 = 3;
/// Bytes a step may swap without meaning anything.
const SLACK: u64 = 4 << 20;

/// Watches swapped bytes from step to step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    swapped: u64,
    streak: u32,
}

impl Pressure {
    /// Once a step, with the process's swapped bytes: whether it is thrashing. Starts to count anew after a
    /// yes.
    pub fn step_ended(&mut self, swapped: u64) -> bool {
        let rose = swapped > self.swapped.saturating_add(SLACK);
        self.swapped = swapped;
        self.streak = if rose { self.streak + 1 } else { 0 };
        if self.streak < STEPS {
            return false;
        }
        self.streak = 0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_swapping_in_several_steps_in_a_row_is_thrash() {
        let mut pressure = Pressure::default();
        let mut after = |mib: u64| pressure.step_ended(mib << 20);
        let seen: Vec<bool> = [10, 20, 20, 30, 40, 50, 51, 52, 60].into_iter().map(&mut after).collect();
        assert_eq!(seen, [false, false, false, false, false, true, false, false, false]);
    }
}
