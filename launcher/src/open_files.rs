//! How many files this process and its children may have open. A coordinator has a connection for each worker
//! of a world of thousands, and 1,024 is what shells give at first; the hard limit is what the machine's
//! owner allows.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the limit as far as the system lets us. Where it does not, connections that are too many wait.
pub fn raise_limit() {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    if soft < hard {
        // Refused by a sandbox perhaps: what is allowed now stays.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}
