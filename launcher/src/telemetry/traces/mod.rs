//! The spans of a worker's training as OpenTelemetry traces.
//!
//! A step is one trace: the step of each rank, and its phases below. All ranks find the same identity of it
//! by themselves, from run, generation and step, so a step stands in a trace viewer with its ranks below each
//! other. What lies outside of steps is in the trace of its generation.
//!
//! ```text
//! step 12, rank 0    ├─ data ─┼─ forward ──┼─ backward ─────────┼─ communication ─┼ optimizer ┤
//! step 12, rank 1    ├ data ┼─ forward ─────┼─ backward ────────┼─ communication ─┼ optimizer ┤
//! ```
//!
//! Spans are made by `coxswain_worker::link::spans` at debug; [`StepSpans`] asks for them whatever the log
//! lets through. Nothing waits for who takes them ([`export`]).

mod export;
mod messages;
mod stretch;

use tracing::{Id, Subscriber, span::Attributes};
use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, Targets},
    layer::Context,
    registry::LookupSpan,
};

pub use self::export::Exporter;
use self::{export::Queue, stretch::Stretch};
use crate::launch::inputs::Env;

/// Where the spans of training are made.
const SPANS: &str = "coxswain_worker::link::spans";

/// Takes the spans of training as they end.
pub struct StepSpans {
    queue: Queue,
}

/// A layer for the log, and what sends what it takes, where `env` names a collector; else neither. A message
/// where it names one that cannot be used.
pub fn to_collector<S>(env: Env) -> Result<Option<(impl Layer<S>, Exporter)>, String>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let Some(endpoint) = export::endpoint(env)? else { return Ok(None) };
    let (exporter, queue) = Exporter::start(endpoint, env)?;
    let spans = Targets::new().with_target(SPANS, LevelFilter::DEBUG);
    Ok(Some((StepSpans { queue }.with_filter(spans), exporter)))
}

impl<S> Layer<S> for StepSpans
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let outer = span.parent().and_then(|outer| outer.extensions().get::<Stretch>().cloned());
        let mut stretch = outer.unwrap_or_default().entered();
        attributes.record(&mut stretch);
        span.extensions_mut().insert(stretch);
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let stretch = context.span(&id).and_then(|span| span.extensions_mut().remove::<Stretch>());
        if let Some(span) = stretch.and_then(|stretch| stretch.into_span()) {
            self.queue.add(span);
        }
    }
}
