//! A buffer per thread for what an operation needs only while it runs: score blocks, weights converted to
//! f32.
//!
//! It grows to the largest request and is kept, so that no operation pays for fresh pages every time it is
//! called.

use std::cell::RefCell;

thread_local! {
    static BUFFER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs `op` with `len` values of unspecified content. Calls do not nest, and `op` must not start parallel
/// work.
pub fn with<R>(len: usize, op: impl FnOnce(&mut [f32]) -> R) -> R {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < len {
            buffer.clear();
            buffer.resize(len, 0.0);
        }
        op(&mut buffer[..len])
    })
}
