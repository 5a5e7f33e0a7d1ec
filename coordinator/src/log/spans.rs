//! The spans of the coordinator's log: run, generation, phase and step, as the news tell them.
//!
//! They are of level debug: `COX_LOG=debug` shows them behind each line of that level, and the JSON log has
//! them with every line. At the default level none is made.

use coxswain_proto::ids::Generation;
use tracing::{Span, debug_span};

use crate::core::{
    news::News,
    reason::{Reason, RunPhase},
};

/// Where the run is. Each span is a child of the one before.
#[derive(Clone, Debug)]
pub(super) struct Spans {
    run: Span,
    generation: (Generation, Span),
    phase: (Option<RunPhase>, Span),
}

impl Spans {
    /// Spans of a run that has not begun.
    pub fn for_run(run_id: &str) -> Self {
        let run = debug_span!("run", run = %run_id);
        Self { generation: (Generation(0), run.clone()), phase: (None, run.clone()), run }
    }

    /// The span of one piece of news, which may begin a generation or a phase.
    pub fn follow(&mut self, news: &News) -> Span {
        match news {
            News::Phase(phase, reason) => self.enter(generation(reason), *phase),
            News::Step(step) => return debug_span!(parent: &self.phase.1, "step", step = step.step.0),
            _ => {}
        }
        self.phase.1.clone()
    }

    fn enter(&mut self, generation: Option<Generation>, phase: RunPhase) {
        let begins = generation.filter(|number| *number != self.generation.0);
        if let Some(number) = begins {
            self.generation = (number, debug_span!(parent: &self.run, "generation", generation = number.0));
        }
        if begins.is_some() || self.phase.0 != Some(phase) {
            self.phase = (Some(phase), debug_span!(parent: &self.generation.1, "phase", %phase));
        }
    }
}

/// The generation that a reason begins or goes on with.
fn generation(reason: &Reason) -> Option<Generation> {
    match reason {
        Reason::Formed { generation, .. }
        | Reason::Started { generation, .. }
        | Reason::Recalled { generation, .. } => Some(*generation),
        _ => None,
    }
}
