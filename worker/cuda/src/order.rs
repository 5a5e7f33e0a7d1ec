//! What work of ours on a GPU comes after, and what comes after it.
//!
//! burn's work is in streams of cubecl's, which hands out neither them nor events on them. But the driver can
//! record an event behind everything that a context was told so far, and have everything that it will be told
//! wait for an event (`cuCtxRecordEvent` and `cuCtxWaitEvent`, CUDA 12.5 and newer); our streams can wait for
//! the one and be waited for by the other. So the GPU keeps the order, and the host goes on.
//!
//! What it does not do: see that cubecl has told the driver what burn told it.

use std::{
    ffi::c_int,
    sync::{Arc, OnceLock},
};

use cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, DriverError,
    result::ctx,
    sys::{CUcontext, CUevent},
};

use crate::libraries;

/// `CUresult cuCtxRecordEvent(CUcontext, CUevent)` (cuda.h), and of the same type `cuCtxWaitEvent`.
type OfContext = unsafe extern "C" fn(CUcontext, CUevent) -> c_int;

/// Both functions, if this driver has them.
fn functions() -> Option<[OfContext; 2]> {
    static FOUND: OnceLock<Option<[OfContext; 2]>> = OnceLock::new();
    // SAFETY: the types are cuda.h's; they have had no other since the functions came in.
    let find = |name| unsafe { libraries::driver_function::<OfContext>(name) };
    *FOUND.get_or_init(|| Some([find("cuCtxRecordEvent")?, find("cuCtxWaitEvent")?]))
}

/// Whether this driver can order work by contexts.
pub fn is_possible() -> bool {
    functions().is_some()
}

/// Lets `stream` begin what it is given next after everything that its GPU has been told so far. False if
/// this driver cannot: then the host has to wait. `context` is the stream's, and current on this thread.
pub fn after_everything(context: &Arc<CudaContext>, stream: &CudaStream) -> Result<bool, DriverError> {
    let event = context.new_event(None)?;
    if !recorded(&event)? {
        return Ok(false);
    }
    stream.wait(&event)?;
    Ok(true)
}

/// Records `event` behind everything that its GPU has been told. `event` is of the context that is current.
fn recorded(event: &CudaEvent) -> Result<bool, DriverError> {
    let (Some([record, _]), Some(current)) = (functions(), ctx::get_current()?) else { return Ok(false) };
    // SAFETY: the context is current and so alive, and the event was made in it.
    Ok(unsafe { record(current, event.cu_event()) } == 0)
}

/// A stream whose work stands in one order with everything else on its GPU. Its events are used again and
/// again: what waits for one waits for what it stood behind when it began to.
pub struct OrderedStream {
    stream: Arc<CudaStream>,
    before: CudaEvent,
    after: CudaEvent,
}

impl OrderedStream {
    /// On the context that is current.
    pub fn new(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        Ok(Self {
            stream: context.new_stream()?,
            before: context.new_event(None)?,
            after: context.new_event(None)?,
        })
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Has `work` give the stream what is to be done after everything that the GPU was told, and before
    /// everything that it will be told. False if that cannot be; then `work` was not called. Its context is
    /// current on this thread.
    pub fn order<E>(
        &self,
        work: impl FnOnce(&CudaStream) -> Result<(), E>,
    ) -> Result<Result<bool, E>, DriverError> {
        let (Some([_, wait]), Some(current)) = (functions(), ctx::get_current()?) else {
            return Ok(Ok(false));
        };
        if !recorded(&self.before)? {
            return Ok(Ok(false));
        }
        self.stream.wait(&self.before)?;
        if let Err(error) = work(&self.stream) {
            return Ok(Err(error));
        }
        self.after.record(&self.stream)?;
        // SAFETY: the context is current and so alive, and the event was made in it.
        let code = unsafe { wait(current, self.after.cu_event()) };
        if code != 0 {
            // Too late to take the work back: the host waits for it instead.
            self.stream.synchronize()?;
        }
        Ok(Ok(true))
    }
}
