//! Panics that may not unwind, and do not end the process.
//!
//! rav1d's functions are `extern "C"`: a panic that gets to the end of one aborts. Before a panic unwinds at
//! all, the panic hook is called on the thread that panicked. On a decoder's thread the hook of this file
//! tells those who wait for the decoder what the panic says, and never returns: nothing of the decoder runs
//! again, nothing of it is freed, and the process goes on without that thread.
//!
//! The standard library holds a lock on the hook while it is called. So no hook can be set once a thread was
//! given up: the call would wait for ever, and with it the next panic of any thread. Programs set theirs
//! when they begin; clippy refuses `set_hook` and `take_hook` everywhere else in this repository.

use std::{
    cell::Cell,
    panic::{self, PanicHookInfo},
    path::Path,
    sync::{
        Once,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// Threads of this process that were given up.
static GIVEN_UP: AtomicUsize = AtomicUsize::new(0);

type Tell = Box<dyn FnOnce(String)>;

thread_local! {
    static TELL: Cell<Option<Tell>> = const { Cell::new(None) };
}

/// How many threads were given up so far.
pub(super) fn given_up() -> usize {
    GIVEN_UP.load(Ordering::Relaxed)
}

/// From now on a panic of this thread is told to `tell`, and the thread goes no further. A panic of `tell`
/// ends the process.
pub(super) fn give_up_on_panic(tell: impl FnOnce(String) + 'static) {
    TELL.set(Some(Box::new(tell)));
}

/// Sets the hook, before the first thread that is to be given up starts. It comes before the hooks that
/// there are, which hear of all other panics.
#[expect(clippy::disallowed_methods, reason = "no decoder exists yet, so that none was given up")]
pub(super) fn set_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| match TELL.try_with(Cell::take) {
            Ok(Some(tell)) => {
                GIVEN_UP.fetch_add(1, Ordering::Relaxed);
                tell(words(panic));
                loop {
                    thread::park();
                }
            }
            _ => before(panic),
        }));
    });
}

/// What a panic says, and the line that it comes from.
fn words(panic: &PanicHookInfo<'_>) -> String {
    let says = panic.payload_as_str().unwrap_or("no message");
    let place = panic.location().and_then(|at| Some((Path::new(at.file()).file_name()?, at.line())));
    match place {
        Some((file, line)) => format!("{says}, {}:{line}", file.display()),
        None => says.to_owned(),
    }
}
