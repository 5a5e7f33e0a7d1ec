//! Out of memory, with everything a reader needs to see why: what was wanted, what was free, what held the
//! rest.

use std::fmt;

use coxswain_proto::{human, ids::Bytes};

use super::{Category, Overrun};
use crate::link::Phase;

/// This rank holds, or was about to hold, more than it may.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct OutOfMemory {
    /// Where.
    pub phase: Phase,
    /// Most bytes in use, or what was expected to be; 0 if only the device knows.
    pub wanted: Bytes,
    /// In use when the phase began.
    pub before: Bytes,
    /// `memory.capacity`; none if the device itself refused.
    pub capacity: Option<Bytes>,
    /// Whether this is a prediction, and nothing has run.
    pub predicted: bool,
    /// The device's own words, if it refused.
    pub device: Option<String>,
    /// What holds memory through the whole run, largest first.
    pub held: Vec<HeldBytes>,
    /// Largest bytes in use in each phase so far.
    pub peaks: Vec<(Phase, Bytes)>,
}

impl OutOfMemory {
    /// What is known where no records are kept.
    pub fn new(phase: Phase, overrun: Overrun, before: u64, capacity: Option<Bytes>) -> Self {
        Self {
            phase,
            wanted: Bytes(overrun.in_use),
            before: Bytes(before),
            capacity: capacity.filter(|_| overrun.device.is_none()),
            predicted: false,
            device: overrun.device,
            held: Vec::new(),
            peaks: Vec::new(),
        }
    }
}

/// Bytes under one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBytes {
    /// What for.
    pub what: Category,
    /// How much.
    pub bytes: Bytes,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (wanted, before) = (self.wanted.0, self.before.0);
        write!(f, "out of memory in {}", self.phase.name())?;
        if wanted > 0 {
            let verb = if self.predicted { "micro-batch not tried, as it needs about" } else { "requested" };
            write!(
                f,
                ": {verb} {} on top of {}",
                human::bytes_closely(wanted.saturating_sub(before)),
                human::bytes_closely(before)
            )?;
        } else if before > 0 {
            write!(f, ", on top of {}", human::bytes_closely(before))?;
        }
        if let Some(capacity) = self.capacity {
            let free = capacity.0.saturating_sub(before);
            write!(
                f,
                ", with {} free of the {} of memory.capacity",
                human::bytes_closely(free),
                human::bytes_closely(capacity.0)
            )?;
        }
        if let Some(device) = &self.device {
            write!(f, "; the device says: {device}")?;
        }
        if !self.held.is_empty() {
            let known: u64 = self.held.iter().map(|held| held.bytes.0).sum();
            let rest = wanted.max(before).saturating_sub(known);
            let parts =
                self.held.iter().map(|held| format!("{} {}", held.what, human::bytes_closely(held.bytes.0)));
            let parts: Vec<String> = parts
                .chain([format!("everything else (activations, inputs) {}", human::bytes_closely(rest))])
                .collect();
            write!(f, "; held: {}", parts.join(", "))?;
        }
        if !self.peaks.is_empty() {
            let parts: Vec<String> = self
                .peaks
                .iter()
                .map(|(phase, bytes)| format!("{} {}", phase.name(), human::bytes_closely(bytes.0)))
                .collect();
            write!(f, "; peaks so far: {}", parts.join(", "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_says_what_was_wanted_what_was_free_and_who_holds_the_rest() {
        let mib = |count: u64| Bytes(count << 20);
        let found = OutOfMemory {
            phase: Phase::Backward,
            wanted: mib(3000),
            before: mib(1000),
            capacity: Some(mib(2048)),
            predicted: false,
            device: None,
            held: vec![
                HeldBytes { what: Category::FrozenWeights, bytes: mib(800) },
                HeldBytes { what: Category::Gradients, bytes: mib(100) },
            ],
            peaks: vec![(Phase::Forward, mib(1900))],
        };
        assert_eq!(
            found.to_string(),
            "out of memory in backward: requested 2,000 MiB on top of 1,000 MiB, with 1,048 MiB free of the 2,048 MiB of memory.capacity; \
             held: frozen weights 800.0 MiB, gradients 100.0 MiB, everything else (activations, inputs) 2,100 MiB; \
             peaks so far: forward 1,900 MiB"
        );
    }
}
