//! What work of ours on a GPU comes after: NCCL's, which has a stream of its own.
//!
//! The driver can record an event behind everything that a context was told so far (`cuCtxRecordEvent`, CUDA
//! 12.5 and newer), and a stream can wait for it. So the GPU keeps the order, and the host goes on.
//!
//! What it does not do: see that cubecl has told the driver what burn told it.

use std::{
    ffi::c_int,
    sync::{Arc, OnceLock},
};

use cudarc::driver::{
    CudaContext, CudaStream, DriverError,
    result::ctx,
    sys::{CUcontext, CUevent},
};

use crate::libraries;

/// `CUresult cuCtxRecordEvent(CUcontext, CUevent)` (cuda.h).
type Record = unsafe extern "C" fn(CUcontext, CUevent) -> c_int;

/// The function, if this driver has it.
fn record() -> Option<Record> {
    static FOUND: OnceLock<Option<Record>> = OnceLock::new();
    // SAFETY: the type is cuda.h's; it has had no other since the function came in.
    *FOUND.get_or_init(|| unsafe { libraries::driver_function("cuCtxRecordEvent") })
}

/// Lets `stream` begin what it is given next after everything that its GPU has been told so far. False if
/// this driver cannot: then the host has to wait. `context` is the stream's, and current on this thread.
pub fn after_everything(context: &Arc<CudaContext>, stream: &CudaStream) -> Result<bool, DriverError> {
    let (Some(record), Some(current)) = (record(), ctx::get_current()?) else { return Ok(false) };
    let event = context.new_event(None)?;
    // SAFETY: the context is current and so alive, and the event was made in it.
    if unsafe { record(current, event.cu_event()) } != 0 {
        return Ok(false);
    }
    stream.wait(&event)?;
    Ok(true)
}
