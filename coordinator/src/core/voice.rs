//! What people are told of a run as a whole: its phase and why, once each time either changes, and which
//! processes were refused.

use super::{
    action::Action,
    news::News,
    reason::{Reason, RunPhase},
    refusal::{Refusal, RefusalMemo},
};

/// What was said last.
#[derive(Clone, Debug)]
pub struct Voice {
    /// Why the run is in its phase.
    pub reason: Reason,
    /// The phase that was published last.
    phase: RunPhase,
    refused: RefusalMemo,
}

impl Voice {
    /// A run that waits for its workers.
    pub fn new(reason: Reason) -> Self {
        Self { reason, phase: RunPhase::WaitingForWorkers, refused: RefusalMemo::default() }
    }

    /// Publishes the phase and its reason if either has changed.
    pub fn say(&mut self, reason: Reason, phase: RunPhase, out: &mut Vec<Action>) {
        let another = self.reason != reason;
        // A run that was stopped is over for the reason for which it was stopping.
        self.reason = reason;
        if another || phase != self.phase {
            self.phase = phase;
            out.push(Action::Publish(News::Phase(phase, self.reason.clone())));
        }
    }

    /// A caller was turned away: told once to each that asks again and again.
    pub fn refuse(&mut self, caller: Option<String>, refusal: &Refusal, out: &mut Vec<Action>) {
        if refusal.is_news() && self.refused.is_news(caller, refusal) {
            out.push(Action::Publish(News::Refused(refusal.clone())));
        }
    }
}
