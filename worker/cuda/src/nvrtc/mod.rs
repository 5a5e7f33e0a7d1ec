//! NVRTC with a memory: a kernel whose text was compiled before is not compiled again.
//!
//! cubecl asks NVRTC under the name `libnvrtc.so`. A library of that name which the process has already is
//! what it gets, so one is loaded first (`stand_in.c`, carried by the binary) that has every call answered
//! here: from [`Kernels`] where the text is there, by NVRTC itself where it is not.
//!
//! ```text
//! cubecl -> stand_in.c -> answer -> kept kernels
//!                                -> NVRTC, and what it made is kept
//! ```
//!
//! What it does not do: decide which NVRTC is loaded ([`libraries`](crate::libraries) does), or touch a
//! kernel's text.
//!
//! All `unsafe` of this module is in this file: C calls it, and it calls C.

use std::{
    collections::HashMap,
    ffi::{CStr, c_char, c_int, c_void},
    path::PathBuf,
    slice,
    sync::{Mutex, OnceLock, PoisonError},
};

use libloading::Library;

use crate::{
    kept::{Kernels, Key},
    libraries,
};

/// The library that answers under NVRTC's name.
const STAND_IN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libnvrtc.so"));
/// Before the name of an architecture, among NVRTC's options.
const ARCHITECTURE: &str = "--gpu-architecture=";
/// `NVRTC_ERROR_INVALID_INPUT`.
const INVALID: c_int = 3;

/// `nvrtcProgram`.
type Program = *mut c_void;
type Texts = *const *const c_char;
type Create = unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, Texts, Texts) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, Texts) -> c_int;
type SizeOf = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type BytesOf = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// `struct answers` of stand_in.c: NVRTC's own functions, or those of this file.
#[repr(C)]
#[derive(Clone, Copy)]
struct Functions {
    create: Create,
    compile: Compile,
    code_size: SizeOf,
    code: BytesOf,
    log_size: SizeOf,
    log: BytesOf,
}

/// A program that cubecl has created: its text until it is compiled, then its code where that was kept.
enum Entry {
    Text(String),
    Code(Vec<u8>),
}

/// What answers.
struct Answers {
    nvrtc: Functions,
    kernels: Kernels,
    /// By NVRTC's handle.
    programs: Mutex<HashMap<usize, Entry>>,
}

static ANSWERS: OnceLock<Answers> = OnceLock::new();

/// The library under NVRTC's name, loaded. It answers nothing yet.
pub struct StandIn {
    library: Library,
    /// Where kernels are kept.
    pub place: PathBuf,
}

impl StandIn {
    /// Loads it, before anything asks for NVRTC by that name; its file is in `place` for a moment. Where that
    /// cannot be, NVRTC is asked each time, and a line says why.
    pub fn load(place: PathBuf) -> Option<Self> {
        match libraries::carried(&place, "nvrtc", STAND_IN) {
            Ok(library) => Some(Self { library, place }),
            Err(why) => {
                tracing::warn!(dir = %place.display(), %why, "cannot save compiled kernels; each start compiles them again");
                None
            }
        }
    }

    /// Has its calls answered from these kernels and by this NVRTC, from now on. An NVRTC that lacks one of
    /// the functions is left to answer by itself.
    pub fn answer(self, nvrtc: Library, kernels: Kernels) {
        let Some(functions) = functions(&nvrtc) else {
            tracing::warn!("this NVRTC lacks a function, so compiled kernels are not saved");
            return;
        };
        // Both are called until the process ends.
        let [_, stand_in] = [nvrtc, self.library].map(|library| &*Box::leak(Box::new(library)));
        ANSWERS.get_or_init(|| Answers { nvrtc: functions, kernels, programs: Mutex::default() });
        let ours = Functions { create, compile, code_size, code, ..functions };
        type SetFunctions = unsafe extern "C" fn(*const Functions);
        // SAFETY: the function is stand_in.c's, and has this type there; it copies what it is shown.
        let given =
            unsafe { stand_in.get::<SetFunctions>(b"coxswain_answers").map(|given| given(&raw const ours)) };
        given.expect("stand_in.c has this function");
    }
}

/// NVRTC's own functions.
fn functions(nvrtc: &Library) -> Option<Functions> {
    // SAFETY: these have had these types since CUDA 7 (nvrtc.h).
    unsafe {
        Some(Functions {
            create: *nvrtc.get(b"nvrtcCreateProgram").ok()?,
            compile: *nvrtc.get(b"nvrtcCompileProgram").ok()?,
            code_size: *nvrtc.get(b"nvrtcGetPTXSize").ok()?,
            code: *nvrtc.get(b"nvrtcGetPTX").ok()?,
            log_size: *nvrtc.get(b"nvrtcGetProgramLogSize").ok()?,
            log: *nvrtc.get(b"nvrtcGetProgramLog").ok()?,
        })
    }
}

impl Answers {
    /// Does something with what is known of a program.
    fn with<R>(&self, act: impl FnOnce(&mut HashMap<usize, Entry>) -> R) -> R {
        act(&mut self.programs.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Keeps what NVRTC has just made of a text.
    fn keep(&self, program: Program, key: &Key, text: &str) {
        let mut size = 0;
        // SAFETY: the handle is NVRTC's, of a program that it has compiled; the size is a live integer.
        if unsafe { (self.nvrtc.code_size)(program, &raw mut size) } != 0 {
            return;
        }
        let mut made = vec![0u8; size];
        // SAFETY: as many bytes as NVRTC has asked for.
        if unsafe { (self.nvrtc.code)(program, made.as_mut_ptr().cast()) } == 0 {
            self.kernels.keep(key, text, &made);
        }
    }
}

unsafe extern "C" fn create(
    program: *mut Program,
    text: *const c_char,
    name: *const c_char,
    headers: c_int,
    contents: Texts,
    names: Texts,
) -> c_int {
    let Some(answers) = ANSWERS.get() else { return INVALID };
    // SAFETY: NVRTC's function, with what its caller gave.
    let code = unsafe { (answers.nvrtc.create)(program, text, name, headers, contents, names) };
    if code == 0 {
        // SAFETY: NVRTC took the text as one that ends with a zero, and has written the handle.
        let (text, handle) = unsafe { (CStr::from_ptr(text).to_string_lossy().into_owned(), *program) };
        answers.with(|programs| programs.insert(handle as usize, Entry::Text(text)));
    }
    code
}

unsafe extern "C" fn compile(program: Program, count: c_int, options: Texts) -> c_int {
    let Some(answers) = ANSWERS.get() else { return INVALID };
    let asked = answers.with(|programs| programs.remove(&(program as usize)));
    let given = usize::try_from(count).unwrap_or(0);
    // SAFETY: the caller has `count` options.
    let architecture = unsafe { slice::from_raw_parts(options, given) }.iter().find_map(|&option| {
        // SAFETY: each of them ends with a zero.
        unsafe { CStr::from_ptr(option) }.to_str().ok()?.strip_prefix(ARCHITECTURE)
    });
    let (Some(Entry::Text(text)), Some(architecture)) = (asked, architecture) else {
        // SAFETY: NVRTC's function, with what its caller gave.
        return unsafe { (answers.nvrtc.compile)(program, count, options) };
    };
    let key = Key::new(&text, architecture);
    if let Some(code) = answers.kernels.find(&key) {
        answers.with(|programs| programs.insert(program as usize, Entry::Code(code)));
        return 0;
    }
    // SAFETY: as above.
    let code = unsafe { (answers.nvrtc.compile)(program, count, options) };
    if code == 0 {
        answers.keep(program, &key, &text);
    }
    code
}

unsafe extern "C" fn code_size(program: Program, size: *mut usize) -> c_int {
    let Some(answers) = ANSWERS.get() else { return INVALID };
    let kept = answers.with(|programs| match programs.get(&(program as usize)) {
        Some(Entry::Code(code)) => Some(code.len()),
        _ => None,
    });
    match kept {
        // SAFETY: the caller's integer.
        Some(bytes) => unsafe { size.write(bytes) },
        // SAFETY: NVRTC's function, with what its caller gave.
        None => return unsafe { (answers.nvrtc.code_size)(program, size) },
    }
    0
}

/// cubecl asks for it once, and has room for as many bytes as it was told.
unsafe extern "C" fn code(program: Program, to: *mut c_char) -> c_int {
    let Some(answers) = ANSWERS.get() else { return INVALID };
    match answers.with(|programs| programs.remove(&(program as usize))) {
        // SAFETY: the caller has room for as many bytes as `code_size` said.
        Some(Entry::Code(code)) => unsafe { to.copy_from_nonoverlapping(code.as_ptr().cast(), code.len()) },
        // SAFETY: NVRTC's function, with what its caller gave.
        _ => return unsafe { (answers.nvrtc.code)(program, to) },
    }
    0
}
