//! Where in a run a span is, and what follows from it: its trace, its own identity, the span above it.

use std::fmt::Debug;

use tracing::field::{Field, Visit};

use super::messages::{KeyValue, Span};
use crate::clock;

/// Where in a run a span is.
#[derive(Clone, Debug, Default)]
pub struct Stretch {
    run: String,
    generation: Option<u64>,
    rank: u64,
    step: Option<u64>,
    phase: Option<String>,
    /// Nanoseconds since the Unix epoch.
    begun: u64,
}

impl Stretch {
    /// This stretch, entered now.
    pub fn entered(self) -> Self {
        Self { begun: now(), ..self }
    }

    /// The span that ends now. None of a whole run, which is longer than a trace can show.
    pub fn into_span(self) -> Option<Span> {
        let generation = self.generation?;
        let trace = [self.run.as_bytes(), &generation.to_le_bytes(), &numbered(self.step)].concat();
        let own = |rank: u64| identity::<8>(&[&trace, &rank.to_le_bytes()]);
        let (name, span_id, parent) = match (&self.phase, self.step) {
            (Some(phase), _) => {
                let begun = [&trace[..], phase.as_bytes(), &self.begun.to_le_bytes()].concat();
                (phase.clone(), identity::<8>(&[&begun, &self.rank.to_le_bytes()]), Some(own(self.rank)))
            }
            // Rank 0's is the root: its identity is known to all.
            (None, Some(step)) => (format!("step {step}"), own(self.rank), (self.rank > 0).then(|| own(0))),
            (None, None) => {
                (format!("generation {generation}"), own(self.rank), (self.rank > 0).then(|| own(0)))
            }
        };
        let mut attributes = vec![
            KeyValue::text("coxswain.run", self.run),
            KeyValue::number("coxswain.generation", generation),
            KeyValue::number("coxswain.rank", self.rank),
        ];
        attributes.extend(self.step.map(|step| KeyValue::number("coxswain.step", step)));
        Some(Span {
            trace_id: identity::<16>(&[&trace]),
            span_id,
            parent_span_id: parent.unwrap_or_default(),
            name,
            kind: Span::INTERNAL,
            start_time_unix_nano: self.begun,
            end_time_unix_nano: now().max(self.begun),
            attributes,
        })
    }
}

impl Visit for Stretch {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "generation" => self.generation = Some(value),
            "rank" => self.rank = value,
            "step" => self.step = Some(value),
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "run" => self.run = format!("{value:?}"),
            "phase" => self.phase = Some(format!("{value:?}")),
            _ => {}
        }
    }
}

/// Nanoseconds since the Unix epoch, until the year 2554.
fn now() -> u64 {
    clock::since_epoch().as_nanos() as u64
}

/// A step, or none, in as many bytes.
fn numbered(step: Option<u64>) -> [u8; 9] {
    let mut bytes = [0; 9];
    if let Some(step) = step {
        bytes[0] = 1;
        bytes[1..].copy_from_slice(&step.to_le_bytes());
    }
    bytes
}

/// The first `N` bytes of a digest; all ranks, whatever their version, have the same.
fn identity<const N: usize>(parts: &[&[u8]]) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize().as_bytes()[..N].to_vec()
}

#[cfg(test)]
mod tests {
    use super::Stretch;

    fn stretch(rank: u64, step: Option<u64>, phase: Option<&str>) -> Stretch {
        let phase = phase.map(str::to_owned);
        Stretch { run: "demo".into(), generation: Some(2), rank, step, phase, begun: 7 }
    }

    #[test]
    fn a_steps_ranks_stand_below_rank_0_and_phases_below_their_ranks_step() {
        let [root, other] = [0, 1].map(|rank| stretch(rank, Some(12), None).into_span().unwrap());
        let forward = stretch(1, Some(12), Some("forward")).into_span().unwrap();
        assert_eq!([&root.trace_id, &other.trace_id], [&forward.trace_id; 2]);
        assert_eq!((root.name.as_str(), root.parent_span_id.is_empty()), ("step 12", true));
        assert_eq!((&other.parent_span_id, &forward.parent_span_id), (&root.span_id, &other.span_id));
        assert_eq!((root.trace_id.len(), root.span_id.len()), (16, 8));
        assert!(root.end_time_unix_nano > root.start_time_unix_nano);
    }

    #[test]
    fn what_is_outside_of_steps_is_in_the_trace_of_its_generation() {
        let load = stretch(0, None, Some("load")).into_span().unwrap();
        let [generation, step] = [None, Some(0)].map(|step| stretch(0, step, None).into_span().unwrap());
        assert_eq!((&load.trace_id, &load.parent_span_id), (&generation.trace_id, &generation.span_id));
        assert_ne!(generation.trace_id, step.trace_id);
        assert!(Stretch::default().into_span().is_none(), "a run");
    }
}
