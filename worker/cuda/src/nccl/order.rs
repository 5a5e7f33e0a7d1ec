//! What a transfer comes after.
//!
//! burn's work is in streams of cubecl's, which hands out neither them nor events on them. But the driver can
//! record an event behind everything that a context was told so far (`cuCtxRecordEvent`, CUDA 12.5 and
//! newer), and our stream can wait for that. So the GPU keeps the order, and the host goes on.
//!
//! What it does not do: see that cubecl has told the driver what burn told it
//! ([`Region::of`](super::region::Region::of) does).

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

/// Lets `stream` begin what it is given next after everything that its GPU has been told so far. False if
/// this driver cannot: then the host has to wait. `context` is the stream's, and current on this thread.
pub fn after_everything(context: &Arc<CudaContext>, stream: &CudaStream) -> Result<bool, DriverError> {
    static RECORD: OnceLock<Option<Record>> = OnceLock::new();
    // SAFETY: the type is cuda.h's; it has had no other since the function came in.
    let found = RECORD.get_or_init(|| unsafe { libraries::driver_function("cuCtxRecordEvent") });
    let (Some(record), Some(current)) = (found, ctx::get_current()?) else { return Ok(false) };
    let event = context.new_event(None)?;
    // SAFETY: the context is alive as long as `context`, whose own it is, and the event was made in it.
    let code = unsafe { record(current, event.cu_event()) };
    if code != 0 {
        return Ok(false);
    }
    stream.wait(&event)?;
    Ok(true)
}
