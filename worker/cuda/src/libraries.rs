//! The driver, NVRTC and what else is loaded at run time, asked whether they are there.
//!
//! cubecl and cudarc load these libraries when they first need them and panic where they cannot, on a thread
//! of theirs. So they are opened here before anything touches either, under the same names, and what is
//! missing is said in words.
//!
//! What it does not do: use them. All `unsafe` of this module is in this file: opening a library runs its
//! initialisers, and a symbol's type is what we say it is.

use std::{ffi::c_int, fs, io, path::Path, process, sync::OnceLock};

use libloading::Library;

use coxswain_worker::device::Version;

/// The driver's own name for itself; cudarc tries it last.
const DRIVER: &str = "libcuda.so.1";
/// The newest first. Not `libnvrtc.so`: under that name [`nvrtc`](crate::nvrtc) stands in for it.
const NVRTC: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11"];

/// `CUDA_ERROR_NO_DEVICE`, an answer rather than an error: there are no GPUs.
const NO_DEVICE: c_int = 100;

/// The driver as it presents itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Driver {
    /// Newest CUDA version it can run.
    pub cuda: Version,
    /// GPUs that this process may use: `CUDA_VISIBLE_DEVICES` is honoured by the driver itself.
    pub gpus: usize,
}

/// Why the driver is of no use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoDriver {
    /// Not there.
    Absent,
    /// There, and it refuses: the call and its error code.
    Refuses(&'static str, i32),
}

/// Loads the driver and counts its GPUs. The library stays loaded: threads of its own may run.
pub fn driver() -> Result<Driver, NoDriver> {
    let library = loaded().ok_or(NoDriver::Absent)?;
    let (mut version, mut gpus) = (0, 0);
    // SAFETY: the three functions have had these signatures since CUDA 2.2 (cuda.h); both pointers are to
    // live integers.
    unsafe {
        let init = symbol::<unsafe extern "C" fn(u32) -> c_int>(library, "cuInit")?;
        match init(0) {
            0 => {}
            NO_DEVICE => return Ok(Driver { cuda: Version::default(), gpus: 0 }),
            code => return Err(NoDriver::Refuses("cuInit", code)),
        }
        type Ask = unsafe extern "C" fn(*mut c_int) -> c_int;
        refused("cuDriverGetVersion", symbol::<Ask>(library, "cuDriverGetVersion")?(&raw mut version))?;
        refused("cuDeviceGetCount", symbol::<Ask>(library, "cuDeviceGetCount")?(&raw mut gpus))?;
    }
    let cuda = Version { major: version as u32 / 1000, minor: version as u32 % 1000 / 10 };
    Ok(Driver { cuda, gpus: usize::try_from(gpus).unwrap_or(0) })
}

fn loaded() -> Option<&'static Library> {
    static LOADED: OnceLock<Option<Library>> = OnceLock::new();
    LOADED.get_or_init(|| open(&[DRIVER])).as_ref()
}

/// A function that not every driver has.
///
/// # Safety
/// `F` must be the type of the function of that name.
pub unsafe fn driver_function<F: Copy>(name: &'static str) -> Option<F> {
    // SAFETY: the caller's promise.
    unsafe { symbol(loaded()?, name) }.ok()
}

/// The compiler, and its version.
pub fn nvrtc() -> Option<(Library, Version)> {
    let library = open(&NVRTC)?;
    let (mut major, mut minor) = (0, 0);
    type Ask = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    // SAFETY: nvrtcVersion has had this signature since CUDA 7 (nvrtc.h); both pointers are to live integers.
    let code = unsafe { symbol::<Ask>(&library, "nvrtcVersion").ok()?(&raw mut major, &raw mut minor) };
    (code == 0).then_some((library, Version { major: major as u32, minor: minor as u32 }))
}

/// The first of these libraries that can be loaded.
pub fn open(names: &[&str]) -> Option<Library> {
    // SAFETY: these are NVIDIA's libraries by their own names, found where the system's loader looks for
    // libraries; their initialisers are what every program that uses them runs.
    names.iter().find_map(|name| unsafe { Library::new(*name) }.ok())
}

/// A library that the binary carries, loaded; its file is in `dir` for a moment.
pub fn carried(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<Library> {
    fs::create_dir_all(dir)?;
    let file = dir.join(format!(".{name}-{}.so", process::id()));
    fs::write(&file, bytes)?;
    // SAFETY: the libraries that are carried have no initialisers, and call nobody until they are told whom.
    let library = unsafe { Library::new(&file) }.map_err(io::Error::other);
    fs::remove_file(&file)?;
    library
}

/// A function of a library.
///
/// # Safety
/// `F` must be the type of the function of that name.
unsafe fn symbol<F: Copy>(library: &Library, name: &'static str) -> Result<F, NoDriver> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<F>(name.as_bytes()) }.map(|found| *found).map_err(|_| NoDriver::Refuses(name, -1))
}

fn refused(call: &'static str, code: c_int) -> Result<(), NoDriver> {
    if code == 0 { Ok(()) } else { Err(NoDriver::Refuses(call, code)) }
}
