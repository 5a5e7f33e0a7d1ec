//! The streams in which cubecl has a GPU work, so that a library's work can stand among its kernels.
//!
//! cubecl hands out no stream. But it records events in them, and finds the driver by the name `libcuda.so`:
//! a library of that name which the process has already is what it gets, so one is loaded first
//! (`stand_in.c`, carried by the binary) that notes in which stream a thread has recorded last.
//!
//! ```text
//! cubecl -> cudarc -> stand_in.c: cuEventRecord -> noted, and the driver's own
//!                     libcuda.so.1: all other functions
//! ```
//!
//! What is given to such a stream by the thread that gives cubecl's orders, in its turn, comes after every
//! kernel that it was given before and before every later one, as a kernel of cubecl's own would.
//!
//! What it does not do: make streams, or wait for them. Finding one asks cubecl for its pending errors, which
//! are lost: it happens before a stream's first product.
//!
//! All `unsafe` of this module is in this file: C calls it, and it calls C.

use std::{
    ffi::{c_int, c_void},
    ptr::NonNull,
    sync::OnceLock,
};

use cubecl::{Runtime, cuda::CudaRuntime, server::ComputeServer, stream_id::StreamId};
use libloading::Library;

use crate::libraries;

/// The library that notes.
const STAND_IN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libcuda.so"));

/// `CUresult cuEventRecord(CUevent, CUstream)` (cuda.h).
type Record = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type RecordedOn = unsafe extern "C" fn() -> *mut c_void;

static RECORDED_ON: OnceLock<RecordedOn> = OnceLock::new();

/// A `CUstream` of cubecl's, which lives as long as the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuntimeStream(NonNull<c_void>);

// SAFETY: the driver takes its streams from any thread, and this one is never destroyed.
unsafe impl Send for RuntimeStream {}

impl RuntimeStream {
    /// The stream of what is ordered under `id`, asked of the thread that gives cubecl's orders. `None` where
    /// the driver was found by another name.
    pub fn find(server: &mut <CudaRuntime as Runtime>::Server, id: StreamId) -> Option<Self> {
        // SAFETY: the function is stand_in.c's, and has this type there.
        let recorded_on = RECORDED_ON.get().map(|recorded_on| move || unsafe { recorded_on() })?;
        recorded_on();
        // An event is recorded in the stream at once; nobody waits for it.
        drop(server.sync(id));
        NonNull::new(recorded_on()).map(Self)
    }

    /// As the driver and its libraries take it.
    pub fn as_ptr(self) -> *mut c_void {
        self.0.as_ptr()
    }
}

/// Notes streams from now on: before anything asks for the driver by its second name. An error is why not.
pub fn note() -> Result<(), String> {
    // SAFETY: the type is cuda.h's.
    let record = unsafe { libraries::driver_function::<Record>("cuEventRecord") };
    let record = record.ok_or("the driver has no cuEventRecord")?;
    let library = libraries::carried(&std::env::temp_dir(), "cuda", STAND_IN);
    let library = library.map_err(|why| format!("{}: {why}", std::env::temp_dir().display()))?;
    // Asked until the process ends.
    let library: &'static Library = Box::leak(Box::new(library));
    type SetRecord = unsafe extern "C" fn(Record);
    // SAFETY: both functions are stand_in.c's, and have these types there; what the first is given stays.
    let recorded_on = unsafe {
        let given = library.get::<SetRecord>(b"coxswain_driver").map(|set| set(record));
        given.and_then(|()| library.get::<RecordedOn>(b"coxswain_recorded_on").map(|found| *found))
    };
    RECORDED_ON.get_or_init(|| recorded_on.expect("stand_in.c has these functions"));
    Ok(())
}
