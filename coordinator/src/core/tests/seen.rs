//! The machine's actions that a test looks at.

use super::{Action, Directive, NODE_LINE, News, RunPhase, StreamId};

/// What a line was told.
pub(super) fn told(actions: &[Action], stream: u64) -> Vec<&Directive> {
    let told = actions.iter().filter_map(|action| match action {
        Action::Tell(to, directive) if *to == StreamId(stream) => Some(directive),
        _ => None,
    });
    told.collect()
}

/// What the launcher was asked: slots and attempts.
pub(super) fn respawns(actions: &[Action]) -> Vec<(u32, u32)> {
    let asked = actions.iter().filter_map(|action| match action {
        Action::TellNode(NODE_LINE, respawn) => Some((respawn.slot.0, respawn.attempt)),
        _ => None,
    });
    asked.collect()
}

/// What was published.
pub(super) fn news(actions: &[Action]) -> Vec<&News> {
    let news = actions.iter().filter_map(|action| match action {
        Action::Publish(news) => Some(news),
        _ => None,
    });
    news.collect()
}

/// The phases that were published, in order.
pub(super) fn phases(actions: &[Action]) -> Vec<RunPhase> {
    let phases = news(actions).into_iter().filter_map(|news| match news {
        News::Phase(phase, _) => Some(*phase),
        _ => None,
    });
    phases.collect()
}
