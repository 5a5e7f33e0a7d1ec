//! The most that was in use of a device's memory, while somebody watches.
//!
//! cubecl's allocator tells what is in use, and not what was. So while it is watched it is asked whenever one
//! of our kernels is given room for what it makes: in the order of the device's work, when all that the
//! kernel reads is still there. What burn's own operations make is seen with the next of ours.
//!
//! Each question waits for the runtime's thread: some ten microseconds, and thousands in a step. Who watches
//! does so in a few steps, and not in all.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use burn_cubecl::CubeRuntime;
use cubecl::client::ComputeClient;

static WATCHED: AtomicBool = AtomicBool::new(false);
static MOST: AtomicU64 = AtomicU64::new(0);

/// Watches from now on, or does not any more.
pub fn watch(on: bool) {
    WATCHED.store(on, Ordering::Relaxed);
}

/// The most bytes in use that were seen since the last call.
pub fn take() -> u64 {
    MOST.swap(0, Ordering::Relaxed)
}

/// Room was given.
pub(super) fn look<R: CubeRuntime>(client: &ComputeClient<R>) {
    if WATCHED.load(Ordering::Relaxed)
        && let Ok(usage) = client.memory_usage()
    {
        MOST.fetch_max(usage.bytes_in_use, Ordering::Relaxed);
    }
}
