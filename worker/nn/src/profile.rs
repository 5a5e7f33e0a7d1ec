//! Where the time and the memory of steps go, for `cox profile`: spans that lie in one another, added up by
//! name.
//!
//! ```text
//! phase(forward) ─┬─ stage: all since the last one, named when it has run
//!                 └─ layer 7 ─┬─ operation(rms norm)
//!                             └─ span(recompute) ── operation(linear)
//! ```
//!
//! Only the thread that has called [`start`] records. On others, and when nobody has, a span is the load of a
//! flag. Times are the wall's on that thread: of an operation that many threads work on, until the last one
//! is done. What this file does not do: see a GPU, whose kernels end later than the calls that ask for them.

use std::{
    cell::RefCell,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::{Duration, Instant},
};

use crate::memory::allocator;

/// Whether any thread records.
static ON: AtomicBool = AtomicBool::new(false);

thread_local! {
    static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// What a span is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// All that was recorded.
    All,
    /// A phase of a step.
    Phase,
    /// A part of the model, in one direction; without a name what lies between such parts.
    Stage,
    /// One layer of a stage, by its number.
    Layer(usize),
    /// Work with a name of its own.
    Part,
    /// A kernel, or what else has no parts that are worth a name.
    Operation,
}

/// What spans of one name, in the same place, came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanSum {
    /// What they are of.
    pub kind: SpanKind,
    /// As the one who opened them calls it.
    pub name: &'static str,
    /// How many there were.
    pub count: u64,
    /// Together, with what lies in them.
    pub time: Duration,
    /// Most bytes in use, of all of the process.
    pub peak: u64,
    /// What lies in them, in the order in which it came first.
    pub inner: Vec<SpanSum>,
}

impl SpanSum {
    fn new(kind: SpanKind, name: &'static str) -> Self {
        Self { kind, name, count: 1, time: Duration::ZERO, peak: 0, inner: Vec::new() }
    }

    /// The time that is in none of its inner spans.
    pub fn own_time(&self) -> Duration {
        self.time.saturating_sub(self.inner.iter().map(|inner| inner.time).sum())
    }

    /// Adds a span that lies in this one.
    fn add(&mut self, span: Self) {
        let same = |known: &&mut Self| known.kind == span.kind && known.name == span.name;
        let Some(known) = self.inner.iter_mut().find(same) else { return self.inner.push(span) };
        known.count += span.count;
        known.time += span.time;
        known.peak = known.peak.max(span.peak);
        span.inner.into_iter().for_each(|inner| known.add(inner));
    }
}

/// The spans of one thread.
struct Recorder {
    /// Spans that are open, from the outermost inwards; the first one is all there is.
    open: Vec<(SpanSum, Instant)>,
}

impl Recorder {
    fn new() -> Self {
        allocator::take_mark();
        Self { open: vec![(SpanSum::new(SpanKind::All, "all"), Instant::now())] }
    }

    /// What was in use since the last boundary belongs to the spans that were open.
    fn mark(&mut self) {
        let peak = allocator::take_mark();
        if let Some((span, _)) = self.open.last_mut() {
            span.peak = span.peak.max(peak);
        }
    }

    fn enter(&mut self, kind: SpanKind, name: &'static str) {
        self.mark();
        self.open.push((SpanSum::new(kind, name), Instant::now()));
    }

    /// Closes the innermost spans until so many are open.
    fn leave(&mut self, depth: usize) {
        self.mark();
        let now = Instant::now();
        while self.open.len() > depth.max(1) {
            let Some((mut span, since)) = self.open.pop() else { return };
            span.time = now - since;
            if let Some((outer, _)) = self.open.last_mut() {
                outer.peak = outer.peak.max(span.peak);
                outer.add(span);
            }
        }
    }
}

/// Ends its span when it is dropped.
#[must_use = "the span ends with this"]
#[derive(Debug)]
pub struct Span {
    /// Spans that were open before it; none if nothing is recorded.
    outer: Option<usize>,
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(outer) = self.outer {
            with(|recorder| recorder.leave(outer));
        }
    }
}

/// An operation begins.
#[inline]
pub fn operation(name: &'static str) -> Span {
    open(SpanKind::Operation, name)
}

/// Work with a name of its own begins.
#[inline]
pub fn part(name: &'static str) -> Span {
    open(SpanKind::Part, name)
}

/// One operation that is not looked into: spans within it are not recorded.
pub fn closed<R>(name: &'static str, work: impl FnOnce() -> R) -> R {
    let _op = operation(name);
    let recorder = RECORDER.take();
    let result = work();
    RECORDER.set(recorder);
    result
}

/// A layer begins.
#[inline]
pub fn layer(number: usize) -> Span {
    open(SpanKind::Layer(number), "layer")
}

/// Another phase of the step begins, and what was open ends.
pub fn phase(name: &'static str) {
    with(|recorder| {
        recorder.leave(1);
        recorder.enter(SpanKind::Phase, name);
    });
}

/// Stages begin: what runs until the next [`stage`] is told apart from what ran before.
pub fn begin_stages() {
    with(|recorder| {
        recorder.leave(2);
        recorder.enter(SpanKind::Stage, "");
    });
}

/// What ran since the last call, or since [`begin_stages`], was this stage.
pub fn stage(name: &'static str) {
    with(|recorder| {
        if let Some((span, _)) = recorder.open.get_mut(2) {
            span.name = name;
        }
        recorder.leave(2);
        recorder.enter(SpanKind::Stage, "");
    });
}

/// This thread records from now on; what it has recorded is gone.
pub fn start() {
    RECORDER.set(Some(Recorder::new()));
    ON.store(true, Relaxed);
}

/// What was recorded on this thread; none if it does not record. It no longer does.
pub fn stop() -> Option<SpanSum> {
    ON.store(false, Relaxed);
    let mut recorder = RECORDER.take()?;
    recorder.leave(1);
    let (mut all, since) = recorder.open.pop()?;
    all.time = since.elapsed();
    Some(all)
}

#[inline]
fn open(kind: SpanKind, name: &'static str) -> Span {
    if !ON.load(Relaxed) {
        return Span { outer: None };
    }
    let outer = with(|recorder| {
        recorder.enter(kind, name);
        recorder.open.len() - 1
    });
    Span { outer }
}

fn with<R>(tell: impl FnOnce(&mut Recorder) -> R) -> Option<R> {
    if !ON.load(Relaxed) {
        return None;
    }
    RECORDER.with_borrow_mut(|recorder| recorder.as_mut().map(tell))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// The flag is one for all threads of the tests.
    static ALONE: Mutex<()> = Mutex::new(());

    fn names(span: &SpanSum) -> Vec<(SpanKind, &'static str, u64)> {
        span.inner.iter().map(|inner| (inner.kind, inner.name, inner.count)).collect()
    }

    #[test]
    fn spans_are_added_up_by_name_where_they_lie() {
        let _alone = ALONE.lock();
        start();
        for _ in 0..2 {
            phase("forward");
            begin_stages();
            for number in [0, 1, 1] {
                let _layer = layer(number);
                drop(operation("linear"));
            }
            stage("language");
            drop(operation("linear"));
            stage("head");
            drop(part("between"));
            phase("optimizer");
            closed("counting", || {
                begin_stages();
                drop(operation("linear"));
                stage("language");
            });
        }
        let all = stop().expect("this thread records");
        assert_eq!(names(&all), [(SpanKind::Phase, "forward", 2), (SpanKind::Phase, "optimizer", 2)]);
        let forward = &all.inner[0];
        let stages =
            [(SpanKind::Stage, "language", 2), (SpanKind::Stage, "head", 2), (SpanKind::Stage, "", 2)];
        assert_eq!(names(forward), stages);
        let layers = [(SpanKind::Layer(0), "layer", 2), (SpanKind::Layer(1), "layer", 4)];
        assert_eq!(names(&forward.inner[0]), layers);
        assert_eq!(names(&forward.inner[0].inner[1]), [(SpanKind::Operation, "linear", 4)]);
        assert_eq!(names(&all.inner[1]), [(SpanKind::Operation, "counting", 2)]);
        assert_eq!(all.inner[1].inner[0].inner, Vec::new());
        let own: Duration = all.own_time() + all.inner.iter().map(|phase| phase.time).sum::<Duration>();
        assert_eq!(own, all.time, "no time is counted twice");
    }

    #[test]
    fn a_span_that_is_broken_off_by_an_unwinding_ends() {
        let _alone = ALONE.lock();
        start();
        phase("forward");
        let broken = std::panic::catch_unwind(|| {
            let _layer = layer(0);
            let _op = operation("linear");
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(broken.is_err());
        // A span that outlives its phase has ended with it.
        let late = operation("late");
        phase("optimizer");
        drop(late);
        drop(operation("adamw"));
        let all = stop().expect("this thread records");
        assert_eq!(
            names(&all.inner[0]),
            [(SpanKind::Layer(0), "layer", 1), (SpanKind::Operation, "late", 1)]
        );
        assert_eq!(names(&all.inner[1]), [(SpanKind::Operation, "adamw", 1)]);
    }

    #[test]
    fn nothing_is_recorded_where_nobody_asked() {
        let _alone = ALONE.lock();
        drop(operation("linear"));
        phase("forward");
        assert_eq!(stop(), None);
        start();
        std::thread::spawn(|| drop(operation("elsewhere"))).join().expect("no panic");
        assert_eq!(stop().map(|all| all.inner), Some(Vec::new()));
    }
}
