//! A device that refuses memory on a thread of its own, as an accelerator's runtime does. In a binary of its
//! own: what is heard is the whole process's.

use std::{
    panic::resume_unwind,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use coxswain_worker::memory::{Overrun, after_refusal, guarded, listen};

/// As cubecl's device thread panics, and catches it.
fn refused_elsewhere() {
    let thread = std::thread::spawn::<_, ()>(|| {
        panic!(
            "called `Result::unwrap()` on an `Err` value: can't allocate buffer of size: 4096\n   0: somewhere"
        );
    });
    assert!(thread.join().is_err());
}

fn words(outcome: Result<(), Overrun>) -> String {
    outcome.expect_err("refused").device.expect("in the device's words")
}

#[test]
fn a_refusal_on_the_devices_thread_is_what_the_guarded_work_failed_of() {
    listen();
    let put_in_order = Arc::new(AtomicU32::new(0));
    let count = put_in_order.clone();
    after_refusal(move || {
        count.fetch_add(1, Relaxed);
        // What was left of the failed work is refused as well.
        refused_elsewhere();
    });
    let message = words(guarded(|| {
        refused_elsewhere();
        resume_unwind(Box::new("couldn't find resource for that handle"))
    }));
    assert!(
        message.contains("can't allocate buffer of size: 4096") && !message.contains("somewhere"),
        "{message}"
    );
    assert_eq!(put_in_order.load(Relaxed), 1);

    // The next work has nothing to do with it.
    assert_eq!(guarded(|| 3), Ok(3));
    assert_eq!(put_in_order.load(Relaxed), 1);
    // Work that does not notice is not believed.
    words(guarded(refused_elsewhere));
    assert_eq!(put_in_order.load(Relaxed), 2);
    // Nor what was refused while nobody was guarded.
    refused_elsewhere();
    assert_eq!(guarded(|| 3), Ok(3));
}
