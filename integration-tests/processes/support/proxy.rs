//! A network that can be cut: a TCP proxy between two processes that stops forwarding without closing
//! anything, as a switch does that loses its power, and goes on later with whatever had been sent meanwhile.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

/// Between two looks at whether the network is whole again.
const LOOK: Duration = Duration::from_millis(5);

/// One place in the network that everything sent to it passes through.
pub struct Proxy {
    /// Where to call instead of the target.
    pub address: String,
    cut: Arc<AtomicBool>,
}

impl Proxy {
    /// Listens at `address`, and forwards to `target` from the first call on.
    pub fn start(address: &str, target: &str) -> Self {
        let listener = TcpListener::bind(address).unwrap_or_else(|error| panic!("{address}: {error}"));
        let cut = Arc::new(AtomicBool::new(false));
        let (target, is_cut) = (target.to_owned(), Arc::clone(&cut));
        // Ends with the test's process.
        thread::spawn(move || {
            for caller in listener.incoming().map_while(Result::ok) {
                let (target, is_cut) = (target.clone(), Arc::clone(&is_cut));
                thread::spawn(move || connect(caller, &target, &is_cut));
            }
        });
        Self { address: address.to_owned(), cut }
    }

    /// Nothing passes from now on; nobody is told.
    pub fn cut(&self) {
        self.cut.store(true, SeqCst);
    }

    /// Everything passes again.
    pub fn heal(&self) {
        self.cut.store(false, SeqCst);
    }
}

fn connect(caller: TcpStream, target: &str, is_cut: &Arc<AtomicBool>) {
    wait_until_whole(is_cut);
    // Nobody listens there, or not any more: the caller sees its connection end.
    let Ok(called) = TcpStream::connect(target) else { return };
    let (Ok(from), Ok(to)) = (caller.try_clone(), called.try_clone()) else { return };
    let back = Arc::clone(is_cut);
    thread::spawn(move || forward(from, to, &back));
    forward(called, caller, is_cut);
}

fn forward(mut from: TcpStream, mut to: TcpStream, is_cut: &AtomicBool) {
    let _ = from.set_nodelay(true);
    let mut buffer = [0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        wait_until_whole(is_cut);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    // An end is news that travels like any other.
    wait_until_whole(is_cut);
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

fn wait_until_whole(is_cut: &AtomicBool) {
    while is_cut.load(SeqCst) {
        thread::sleep(LOOK);
    }
}
