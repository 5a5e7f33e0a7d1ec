//! GPUs: those of this machine, as the driver sees them, and the usual ones by name.
//!
//! The driver's management library (NVML) is loaded when it is asked for; without it there is a sentence to
//! say, not a crash. What the driver counts as used includes every process and its context, which an
//! allocator never sees.

mod device;
mod health;
pub mod named;
mod nvml;

pub use device::{Gpu, GpuProcess, Peaks};
pub use health::Sensors;
pub use nvml::Driver;
