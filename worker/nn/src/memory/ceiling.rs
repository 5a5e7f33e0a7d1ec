//! The ceiling over what a rank may hold, and the way out for work that goes through it, or whose result is
//! of no use any more.
//!
//! ```text
//! guarded_unless(called off?, || forward and backward) ── Ok(result)
//!         └─ between layers: check() ─┬─ over the ceiling: unwinds to guarded ── Err(OutOfMemory)
//!                                     └─ called off: unwinds to guarded ──────── Err(CalledOff)
//! ```
//!
//! Layers do not return errors: their only failure is memory, and on an accelerator that failure comes as a
//! panic from inside a kernel's allocation. So both take the same way: [`guarded`] catches the unwinding,
//! everything the pass held is dropped on the way, and the caller gets a value. The unwinding that [`check`]
//! starts runs no panic hook and prints nothing. Any other panic goes on. What a device refuses on a thread
//! of its own is heard by `refusal`.
//!
//! The ceiling belongs to a thread, the trainer's: tests run several in one process. What this file does not
//! do: bound allocations themselves. A layer may overshoot before the next check; the ceiling counts what was
//! asked for, it does not refuse.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use super::{allocator, refusal};

thread_local! {
    static CEILING: Cell<u64> = const { Cell::new(u64::MAX) };
    static GUARDED: Cell<bool> = const { Cell::new(false) };
    static CALLED_OFF: RefCell<Option<Box<dyn Fn() -> bool>>> = const { RefCell::new(None) };
}

/// Guarded work asked for more memory than there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overrun {
    /// Most bytes in use; 0 if only the device knows.
    pub in_use: u64,
    /// The device's words, if the failure was its own.
    pub device: Option<String>,
}

/// Why guarded work has not come to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuardedError {
    /// It ran out of memory.
    OutOfMemory(Overrun),
    /// It was told that its result is of no use any more.
    CalledOff,
}

/// What the unwinding carries where work was called off.
struct CalledOff;

/// Sets this thread's ceiling; none lifts it.
pub fn set(bytes: Option<u64>) {
    CEILING.set(bytes.unwrap_or(u64::MAX));
}

/// Ends the [`guarded`] work around the call if it has gone through the ceiling, or was called off. Called
/// between layers, so it is a sign of motion, too.
pub fn check() {
    crate::pulse::beat();
    if !GUARDED.get() {
        return;
    }
    if allocator::guard_peak() > CEILING.get() {
        resume_unwind(Box::new(Overrun { in_use: allocator::guard_peak(), device: None }));
    }
    if CALLED_OFF.with_borrow(|called_off| called_off.as_ref().is_some_and(|called_off| called_off())) {
        resume_unwind(Box::new(CalledOff));
    }
}

/// [`guarded`], which also ends at the first [`check`] at which `called_off` says so.
pub fn guarded_unless<R>(
    called_off: impl Fn() -> bool + 'static,
    work: impl FnOnce() -> R,
) -> Result<R, GuardedError> {
    let outer = CALLED_OFF.replace(Some(Box::new(called_off)));
    let result = catch_unwind(AssertUnwindSafe(|| guarded(work)));
    CALLED_OFF.set(outer);
    match result {
        Ok(result) => result.map_err(GuardedError::OutOfMemory),
        Err(payload) if payload.is::<CalledOff>() => Err(GuardedError::CalledOff),
        Err(payload) => resume_unwind(payload),
    }
}

/// Runs `work`, to its end or until memory runs out. On `Err` everything that `work` owned is gone; what it
/// had borrowed mutably may be half-written.
pub fn guarded<R>(work: impl FnOnce() -> R) -> Result<R, Overrun> {
    allocator::restart_guard_peak();
    refusal::leave_none_behind();
    let outer = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(outer);
    let heard = refusal::take();
    let outcome = match (heard, result) {
        (Some(words), _) => Err(Overrun { in_use: 0, device: Some(words) }),
        (None, Ok(result)) if allocator::guard_peak() <= CEILING.get() => Ok(result),
        (None, Ok(_)) => Err(Overrun { in_use: allocator::guard_peak(), device: None }),
        (None, Err(payload)) => Err(overrun_of(payload)),
    };
    if matches!(&outcome, Err(Overrun { device: Some(_), .. })) {
        refusal::set_in_order();
    }
    outcome
}

/// [`guarded`], and once more if a device refused memory: by then its allocator has given back what it kept
/// for other sizes.
pub fn guarded_again<R>(mut work: impl FnMut() -> R) -> Result<R, Overrun> {
    match guarded(&mut work) {
        Err(Overrun { device: Some(_), .. }) => guarded(work),
        outcome => outcome,
    }
}

/// The overrun that a panic stands for; goes on panicking if it stands for something else.
fn overrun_of(payload: Box<dyn Any + Send>) -> Overrun {
    let payload = match payload.downcast::<Overrun>() {
        Ok(overrun) => return *overrun,
        Err(payload) => payload,
    };
    let words = payload.downcast_ref::<String>().map(String::as_str);
    let words = words.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or_default();
    if !refusal::is_out_of_memory(words) {
        resume_unwind(payload);
    }
    Overrun { in_use: 0, device: Some(refusal::in_short(words).to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_says_about_memory_is_an_overrun_and_other_panics_go_on() {
        for words in ["CUDA_ERROR_OUT_OF_MEMORY", "out of memory", "IoError::OutOfMemory { size: 8 }"] {
            let found = guarded(|| resume_unwind(Box::new(words.to_owned())));
            assert_eq!(found.map_err(|overrun: Overrun| overrun.device), Err::<(), _>(Some(words.into())));
        }
        let other = catch_unwind(|| guarded(|| resume_unwind(Box::new("index out of bounds"))));
        assert!(other.is_err());
        assert!(!GUARDED.get());
    }

    #[test]
    fn work_that_is_called_off_ends_at_the_next_check_and_later_work_does_not() {
        let layers = std::rc::Rc::new(Cell::new(0));
        let work = || {
            for _ in 0..5 {
                check();
                layers.set(layers.get() + 1);
            }
        };
        let seen = layers.clone();
        assert_eq!(guarded_unless(move || seen.get() == 2, work), Err(GuardedError::CalledOff));
        assert_eq!(layers.get(), 2);
        assert_eq!(guarded_unless(|| false, work), Ok(()));
        assert_eq!(guarded(work), Ok(()), "what was called off is over");
        assert_eq!(layers.get(), 12);
        assert!(!GUARDED.get());
    }

    #[test]
    fn other_panics_go_through_work_that_can_be_called_off() {
        let panicking = || guarded_unless(|| false, || resume_unwind(Box::new("index out of bounds")));
        assert!(catch_unwind(panicking).is_err());
        assert!(CALLED_OFF.with_borrow(Option::is_none));
    }

    #[test]
    fn work_that_a_device_has_refused_memory_is_tried_once_more() {
        let mut tries = 0;
        let mut refused_until = |last: u32| {
            tries = 0;
            let found = guarded_again(|| {
                tries += 1;
                assert!(tries > last, "out of memory");
            });
            (found.is_ok(), tries)
        };
        assert_eq!(refused_until(0), (true, 1));
        assert_eq!(refused_until(1), (true, 2));
        assert_eq!(refused_until(2), (false, 2));
    }

    #[test]
    fn work_that_stays_below_gives_its_result() {
        assert_eq!(guarded(|| 3), Ok(3));
        check();
    }
}
