//! What a process holds, counted; and work that goes over a bound, or whose device refuses, as a value.
//!
//! ```text
//! allocator   the process's allocator, counting
//! ceiling     guarded work: over its capacity it ends as an `Overrun`
//! refusal     what a device's allocator refused
//! ```

pub mod allocator;
pub mod ceiling;
pub mod refusal;

pub use allocator::{CountingAllocator, in_use};
pub use ceiling::{GuardedError, Overrun, check, guarded, guarded_again, guarded_unless};
pub use refusal::{after_refusal, listen, refused};
