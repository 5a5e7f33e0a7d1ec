//! Allocations that a device refuses on a thread of its own.
//!
//! An accelerator's runtime takes orders on one thread and carries them out on another. There an allocation
//! that the driver refuses panics, and the runtime catches that by itself; the thread that ordered is told
//! later, if at all, of its consequence (a missing buffer), in words that say nothing of memory. So the
//! panic itself is heard, where every panic of a process passes by: in the panic hook.
//! [`guarded`](super::guarded) work takes what was heard meanwhile for its own failure, whatever it fails
//! with, and even if it seems to have gone well: its results are not there.
//!
//! After a refusal the device is set in order before any work goes on ([`after_refusal`]): what failed orders
//! left behind fails now, and what its allocator keeps for later sizes is given back.
//!
//! Until then what fails on any thread fails in consequence: orders by the hundred, each with a panic of its
//! own. Those are not printed.
//!
//! One GPU in a process, one trainer: what is heard belongs to the work that is guarded. What this file does
//! not do: make anything fail, or know a device. A process that never calls [`listen`] hears nothing.

use std::{
    cell::RefCell,
    panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook},
    sync::{
        Mutex, Once, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// The first refusal since the last [`take`].
static HEARD: Mutex<Option<String>> = Mutex::new(None);

/// Whether there was one after which the device is not in order yet.
static OUT_OF_ORDER: AtomicBool = AtomicBool::new(false);

thread_local! {
    static ORDER: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
}

/// From now on refusals on any thread are heard, and neither they nor their consequences printed; other
/// panics go to the hook there was. Once in a process, and before any data are read: a decoder of video that
/// panics must come to its own hook first.
#[expect(clippy::disallowed_methods, reason = "before anything is decoded")]
pub fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| match refusal(panic) {
            Some(words) => hear(words),
            None if OUT_OF_ORDER.load(Ordering::Relaxed) => {
                tracing::debug!(%panic, "a panic that a refused allocation has caused");
            }
            None => before(panic),
        }));
    });
}

fn refusal(panic: &PanicHookInfo<'_>) -> Option<String> {
    let words = panic.payload_as_str()?;
    is_out_of_memory(words).then(|| in_short(words).to_owned())
}

fn hear(words: String) {
    OUT_OF_ORDER.store(true, Ordering::Relaxed);
    HEARD.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(words);
}

/// What was refused since guarded work ended: for work that cannot be guarded, because it changes what it
/// works on.
pub fn refused() -> Option<String> {
    OUT_OF_ORDER.store(false, Ordering::Relaxed);
    take()
}

/// A refusal that is still there belonged to work that was not guarded: it is logged, and later work finds
/// the device in order.
pub fn leave_none_behind() {
    if let Some(words) = take() {
        tracing::warn!(device = %words, "the device ran out of memory outside a step; what was computed then is lost, and training continues");
        set_in_order();
    }
}

/// What was heard since the last call.
pub fn take() -> Option<String> {
    HEARD.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// What sets this thread's device in order after a refusal. It may panic.
pub fn after_refusal(order: impl Fn() + 'static) {
    ORDER.set(Some(Box::new(order)));
}

/// Sets this thread's device in order. What that is refused in turn says nothing new.
pub fn set_in_order() {
    ORDER.with_borrow(|order| {
        if let Some(order) = order
            && catch_unwind(AssertUnwindSafe(order)).is_err()
        {
            tracing::warn!("the device reports an error after a refused allocation; the next step will show whether it recovers");
        }
    });
    take();
    OUT_OF_ORDER.store(false, Ordering::Relaxed);
}

/// Whether a message stands for memory that was refused. Drivers and runtimes agree on the words `out of
/// memory`, not on how they are written; cubecl 0.10 calls the driver's answer a buffer that it cannot
/// allocate.
pub fn is_out_of_memory(words: &str) -> bool {
    let letters: String = words.chars().filter(char::is_ascii_alphabetic).collect();
    let letters = letters.to_ascii_lowercase();
    ["outofmemory", "cantallocatebuffer"].iter().any(|sign| letters.contains(sign))
}

/// What a device says, without what Rust says before it and the backtrace behind it.
pub fn in_short(words: &str) -> &str {
    let first = words.lines().next().unwrap_or_default();
    first.strip_prefix("called `Result::unwrap()` on an `Err` value: ").unwrap_or(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_quoted_in_short() {
        let words =
            "called `Result::unwrap()` on an `Err` value: can't allocate buffer of size: 98304\nbacktrace";
        assert_eq!(in_short(words), "can't allocate buffer of size: 98304");
        assert_eq!(in_short("CUDA_ERROR_OUT_OF_MEMORY"), "CUDA_ERROR_OUT_OF_MEMORY");
    }

    #[test]
    fn what_devices_say_of_memory_is_told_from_everything_else() {
        for words in [
            "CUDA_ERROR_OUT_OF_MEMORY",
            "An out-of-memory error happened during launch",
            "called `Result::unwrap()` on an `Err` value: can't allocate buffer of size: 1073741824\nbacktrace",
            "IoError::OutOfMemory { size: 8 }",
        ] {
            assert!(is_out_of_memory(words), "{words}");
        }
        for words in
            ["index out of bounds", "couldn't find resource for that handle", "CUDA_ERROR_NO_DEVICE", ""]
        {
            assert!(!is_out_of_memory(words), "{words}");
        }
    }
}
