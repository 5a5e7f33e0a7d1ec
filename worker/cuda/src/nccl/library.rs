//! NCCL's C interface, and all `unsafe` of the communicator.
//!
//! The library is opened by its own name, `libnccl.so.2`: cudarc looks for `libnccl.so` and CUDA's version
//! numbers only, none of which an installation without developer files has, and panics. Types are cudarc's;
//! results are read as the integers they are, because a newer library may have more of them than the enum.
//!
//! A [`Communicator`] lives on one thread (it is not `Send`), and no operation blocks: a caller that gets
//! [`State::InProgress`] asks [`Communicator::state`] until it says otherwise.
//!
//! What it does not do: decide when to give up, or look at other ranks.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    marker::PhantomData,
    ops::Range,
    sync::OnceLock,
};

use cudarc::{
    driver::{CudaSlice, CudaStream, DevicePtrMut},
    nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId},
};
use libloading::Library;

use coxswain_worker::collective::{Reduce, TransportError, TransportId};

use super::{
    limit::{ABORT_LIMIT, within},
    region::Region,
};
use crate::libraries;

/// As the loader knows it; the second is there where developer files are.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// `ncclSuccess` and `ncclInProgress` (nccl.h).
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// `NCCL_CONFIG_INITIALIZER` (nccl.h): the magic number, what leaves a field to the library, and the version
/// whose fields we know.
const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;
const CONFIG_VERSION: u32 = 21_700;
/// The oldest library with non-blocking communicators.
const OLDEST: u32 = 21_400;

macro_rules! functions {
    ($($name:ident $symbol:literal ($($argument:ty),*);)*) => {
        /// The functions in use.
        struct Functions { $($name: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Functions {
            fn load(library: &Library) -> Option<Self> {
                // SAFETY: the types are those of nccl.h, unchanged since NCCL 2.14.
                Some(unsafe { Self { $($name: *library.get($symbol.as_bytes()).ok()?,)* } })
            }
        }
    };
}

functions! {
    version "ncclGetVersion" (*mut c_int);
    unique_id "ncclGetUniqueId" (*mut ncclUniqueId);
    init "ncclCommInitRankConfig" (*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t);
    async_error "ncclCommGetAsyncError" (ncclComm_t, *mut c_int);
    finalize "ncclCommFinalize" (ncclComm_t);
    destroy "ncclCommDestroy" (ncclComm_t);
    abort "ncclCommAbort" (ncclComm_t);
    all_reduce "ncclAllReduce" (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, *mut c_void);
    reduce_scatter "ncclReduceScatter" (*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, *mut c_void);
    all_gather "ncclAllGather" (*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, *mut c_void);
    broadcast "ncclBroadcast" (*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void);
    send "ncclSend" (*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void);
    receive "ncclRecv" (*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, *mut c_void);
    group_start "ncclGroupStart" ();
    group_end "ncclGroupEnd" ();
}

/// The loaded library.
pub struct Nccl {
    functions: Functions,
    last_error: Option<unsafe extern "C" fn(ncclComm_t) -> *const c_char>,
    version: u32,
}

/// Loads the library, once in a process; it stays loaded.
pub fn load() -> Result<&'static Nccl, TransportError> {
    static LOADED: OnceLock<Result<Nccl, TransportError>> = OnceLock::new();
    LOADED.get_or_init(Nccl::open).as_ref().map_err(Clone::clone)
}

impl Nccl {
    fn open() -> Result<Self, TransportError> {
        let library = libraries::open(&NAMES).ok_or_else(|| {
            TransportError(
                "no NCCL (libnccl.so.2 cannot be loaded): install it (package libnccl2, or nvidia-nccl of PyPI) and put its \
                 directory into LD_LIBRARY_PATH"
                    .to_owned(),
            )
        })?;
        // Never unloaded: the library has threads of its own.
        let library: &'static Library = Box::leak(Box::new(library));
        let functions = Functions::load(library);
        let too_old = |found: String| {
            TransportError(format!("NCCL is too old ({found}): version {OLDEST} (2.14) or newer is needed"))
        };
        let functions = functions.ok_or_else(|| too_old("functions are missing".to_owned()))?;
        // SAFETY: as for the others; absent before NCCL 2.13.
        let last_error = unsafe { library.get(b"ncclGetLastError").ok().map(|found| *found) };
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        let code = unsafe { (functions.version)(&raw mut version) };
        let version = u32::try_from(version).unwrap_or(0);
        if code != SUCCESS || version < OLDEST {
            return Err(too_old(version.to_string()));
        }
        Ok(Self { functions, last_error, version })
    }

    /// `20000 + 100 * minor + patch`.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// A new id. Starts listening for the ranks that will be given it.
    pub fn unique_id(&self) -> Result<TransportId, TransportError> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: the pointer is to a live id of the size of nccl.h.
        let code = unsafe { (self.functions.unique_id)(&raw mut id) };
        self.accepted("ncclGetUniqueId", code, std::ptr::null_mut())?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// What a call's result means.
    fn accepted(&self, call: &str, code: c_int, comm: ncclComm_t) -> Result<State, TransportError> {
        match code {
            SUCCESS => Ok(State::Done),
            IN_PROGRESS => Ok(State::InProgress),
            code => {
                // SAFETY: the function takes any communicator or null, and returns a string that lives as
                // long as the library.
                let message =
                    self.last_error.map(|ask| unsafe { ask(comm) }).filter(|message| !message.is_null());
                // SAFETY: see above; the string ends with a zero.
                let message = message
                    .map(|message| unsafe { CStr::from_ptr(message) }.to_string_lossy().trim().to_owned());
                let message = message
                    .filter(|message| !message.is_empty())
                    .unwrap_or_else(|| "set NCCL_DEBUG=INFO for details".into());
                Err(TransportError(format!("{call}: {} ({message})", meaning(code))))
            }
        }
    }
}

/// NCCL's results in its documentation's words.
fn meaning(code: c_int) -> String {
    match code {
        1 => "unhandled CUDA error".into(),
        2 => "unhandled system error".into(),
        3 => "internal error".into(),
        4 => "invalid argument".into(),
        5 => "invalid usage".into(),
        6 => "remote error: a peer has left".into(),
        code => format!("result {code}"),
    }
}

/// Whether what was asked for is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Done, or enqueued on the stream.
    Done,
    /// Ask again.
    InProgress,
}

/// Number types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// 2 bytes, bfloat16.
    Bf16,
    /// 4 bytes.
    F32,
    /// 8 bytes.
    F64,
}

impl Kind {
    fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    fn nccl(self) -> ncclDataType_t {
        match self {
            Self::Bf16 => ncclDataType_t::ncclBfloat16,
            Self::F32 => ncclDataType_t::ncclFloat32,
            Self::F64 => ncclDataType_t::ncclFloat64,
        }
    }
}

/// One operation in place on a buffer of elements.
#[derive(Clone, Debug)]
pub enum Call {
    /// On `0..count`.
    AllReduce { count: usize, reduce: Reduce },
    /// On `world` chunks; this rank's stays.
    ReduceScatter { chunk: usize, reduce: Reduce },
    /// On `world` chunks; this rank brings its own.
    AllGather { chunk: usize },
    /// On `0..count`.
    Broadcast { count: usize, root: usize },
    /// Sends one range to a rank and fills another from a rank.
    Shift { send: Range<usize>, to: usize, receive: Range<usize>, from: usize },
}

/// Memory on the GPU that an operation works on.
#[derive(Debug)]
pub enum Memory<'a> {
    /// Our own.
    Staging(&'a mut CudaSlice<u8>),
    /// A tensor's.
    Tensor(&'a Region),
}

/// A rank's communicator. Not `Send`.
pub struct Communicator {
    nccl: &'static Nccl,
    comm: ncclComm_t,
    rank: usize,
    world: usize,
    one_thread: PhantomData<*mut ()>,
}

impl Communicator {
    /// Begins to connect; the CUDA context of this thread's GPU must be current. Ask [`Communicator::state`]
    /// until it is done.
    pub fn begin(
        nccl: &'static Nccl,
        id: &TransportId,
        rank: usize,
        world: usize,
    ) -> Result<Self, TransportError> {
        // SAFETY: integers and pointers only, for which zero is a value.
        let mut config: ncclConfig_t = unsafe { std::mem::zeroed() };
        // The library reads the fields of the version we name, and no byte beyond the smaller of both sizes.
        config.size = size_of::<ncclConfig_t>();
        config.magic = MAGIC;
        config.version = CONFIG_VERSION;
        config.blocking = 0;
        config.cgaClusterSize = UNDEFINED;
        config.minCTAs = UNDEFINED;
        config.maxCTAs = UNDEFINED;
        config.splitShare = UNDEFINED;
        config.trafficClass = UNDEFINED;
        config.collnetEnable = UNDEFINED;
        config.CTAPolicy = UNDEFINED;
        config.shrinkShare = UNDEFINED;
        config.nvlsCTAs = UNDEFINED;
        config.nChannelsPerNetPeer = UNDEFINED;
        config.nvlinkCentricSched = UNDEFINED;
        config.graphUsageMode = UNDEFINED;
        config.numRmaCtx = UNDEFINED;
        config.maxP2pPeers = UNDEFINED;
        let id = ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let mut comm: ncclComm_t = std::ptr::null_mut();
        // SAFETY: both pointers are to live values; the library copies the configuration before it returns.
        let code = unsafe {
            (nccl.functions.init)(&raw mut comm, world as c_int, id, rank as c_int, &raw mut config)
        };
        let this = Self { nccl, comm, rank, world, one_thread: PhantomData };
        nccl.accepted("ncclCommInitRankConfig", code, comm)?;
        Ok(this)
    }

    /// How the last call stands, and whether something has failed since.
    pub fn state(&self) -> Result<State, TransportError> {
        let mut code = SUCCESS;
        // SAFETY: the communicator is alive (only `abort` and `leave` end it, and both take it away), the
        // pointer is to an integer.
        let asked = unsafe { (self.nccl.functions.async_error)(self.comm, &raw mut code) };
        self.nccl.accepted("ncclCommGetAsyncError", asked, self.comm)?;
        self.nccl.accepted("NCCL", code, self.comm)
    }

    /// Enqueues an operation on `stream`, in place on `memory`, which the caller keeps, and lets nobody else
    /// touch, until the stream has passed the operation or the communicator is gone.
    ///
    /// Panics if the operation reaches beyond the memory: the caller made both.
    pub fn start(
        &self,
        call: &Call,
        kind: Kind,
        memory: Memory<'_>,
        stream: &CudaStream,
    ) -> Result<State, TransportError> {
        let (world, rank) = (self.world, self.rank);
        let reach = match call {
            Call::AllReduce { count, .. } | Call::Broadcast { count, .. } => *count,
            Call::ReduceScatter { chunk, .. } | Call::AllGather { chunk } => chunk * world,
            Call::Shift { send, receive, .. } => send.end.max(receive.end),
        };
        // What is held is held until the operation is enqueued.
        let (start, bytes, _held) = match memory {
            Memory::Staging(buffer) => {
                let bytes = buffer.len();
                let (start, held) = buffer.device_ptr_mut(stream);
                (start, bytes, Some(held))
            }
            Memory::Tensor(region) => (region.address(), region.bytes(), None),
        };
        assert!(reach * kind.bytes() <= bytes, "an operation on {reach} elements fits its memory");
        let at = |element: usize| (start as usize + element * kind.bytes()) as *mut c_void;
        let (f, comm, data) = (&self.nccl.functions, self.comm, kind.nccl());
        let stream = stream.cu_stream().cast::<c_void>();
        // SAFETY: every pointer is into `memory`, as many elements before its end as the call takes (asserted
        // above): of a slice that cudarc allocated, or of a tensor whose memory its `Region` keeps. The
        // caller keeps either until the stream has passed the operation, and nothing else is ordered on it
        // meanwhile: of a tensor the stream waits for burn's orders first, and the buffer is borrowed mutably
        // until the transfer ends. Communicator and stream are alive.
        let code = unsafe {
            match call {
                Call::AllReduce { count, reduce } => {
                    (f.all_reduce)(at(0), at(0), *count, data, operator(*reduce), comm, stream)
                }
                Call::ReduceScatter { chunk, reduce } => {
                    (f.reduce_scatter)(at(0), at(chunk * rank), *chunk, data, operator(*reduce), comm, stream)
                }
                Call::AllGather { chunk } => {
                    (f.all_gather)(at(chunk * rank), at(0), *chunk, data, comm, stream)
                }
                Call::Broadcast { count, root } => {
                    (f.broadcast)(at(0), at(0), *count, data, *root as c_int, comm, stream)
                }
                Call::Shift { send, to, receive, from } => {
                    let begun = (f.group_start)();
                    let sent = (f.send)(at(send.start), send.len(), data, *to as c_int, comm, stream);
                    let got =
                        (f.receive)(at(receive.start), receive.len(), data, *from as c_int, comm, stream);
                    let ended = (f.group_end)();
                    let codes = [begun, sent, got, ended];
                    codes.into_iter().find(|code| ![SUCCESS, IN_PROGRESS].contains(code)).unwrap_or(ended)
                }
            }
        };
        self.nccl.accepted("NCCL", code, comm)
    }

    /// Leaves in good order, once `patience` (asked between looks) lets it: other ranks may still be reading.
    pub fn leave(mut self, mut patience: impl FnMut() -> bool) {
        let comm = std::mem::replace(&mut self.comm, std::ptr::null_mut());
        let f = &self.nccl.functions;
        let mut code = SUCCESS;
        // SAFETY: the communicator is alive, and after this function nobody has it.
        unsafe {
            let begun = (f.finalize)(comm);
            let mut going = begun == SUCCESS || begun == IN_PROGRESS;
            while going && (f.async_error)(comm, &raw mut code) == SUCCESS && code == IN_PROGRESS {
                going = patience();
            }
            // Nothing can be done about either's result.
            if going && code == SUCCESS {
                (f.destroy)(comm);
            } else {
                within(ABORT_LIMIT, "ncclCommAbort", || (f.abort)(comm));
            }
        }
    }
}

impl Drop for Communicator {
    /// Ends whatever is in flight, without waiting for other ranks.
    fn drop(&mut self) {
        if !self.comm.is_null() {
            // SAFETY: the communicator is alive, and after this nobody has it. Its kernels end; buffers they
            // used are freed later.
            within(ABORT_LIMIT, "ncclCommAbort", || unsafe { (self.nccl.functions.abort)(self.comm) });
        }
    }
}

fn operator(reduce: Reduce) -> ncclRedOp_t {
    match reduce {
        Reduce::Sum => ncclRedOp_t::ncclSum,
        Reduce::Max => ncclRedOp_t::ncclMax,
    }
}
