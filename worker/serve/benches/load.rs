//! Clients that send one observation again and again, and what they wait for its answers. For any server that
//! speaks openpi's protocol: `integration-tests/bench/serve.py` runs it against two.
//!
//! ```text
//! load ADDRESS CLIENTS SECONDS FILE      FILE: the observation's message, as it is sent
//! ```
//!
//! Prints one JSON object: answers a second, and p50, p99 and worst latency in milliseconds.

use std::{
    net::TcpStream,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use tungstenite::{Message, WebSocket};

/// Answers of each client before the clock starts.
const WARM_UP: usize = 10;

fn connect(address: &str) -> WebSocket<TcpStream> {
    let stream = TcpStream::connect(address).expect("a server listens there");
    stream.set_nodelay(true).expect("a TCP socket");
    let (mut socket, _) = tungstenite::client(format!("ws://{address}/"), stream).expect("it upgrades");
    socket.read().expect("metadata comes first");
    socket
}

fn ask(socket: &mut WebSocket<TcpStream>, observation: &[u8]) -> Duration {
    let begun = Instant::now();
    socket.send(Message::binary(observation.to_vec())).expect("it reads");
    loop {
        match socket.read().expect("it answers") {
            Message::Binary(_) => return begun.elapsed(),
            // Answered by the library.
            Message::Ping(_) => {}
            other => panic!("{other}"),
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().filter(|it| it != "--bench").skip(1).collect();
    let [address, clients, seconds, file] = &arguments[..] else {
        // `cargo bench` and `cargo test` run it without a server.
        return;
    };
    let observation = std::fs::read(file).expect("the observation's file");
    let (clients, seconds): (usize, f64) =
        (clients.parse().expect("a number"), seconds.parse().expect("a number"));
    let ready = Barrier::new(clients);
    let body = || {
        let mut socket = connect(address);
        for _ in 0..WARM_UP {
            ask(&mut socket, &observation);
        }
        ready.wait();
        let begun = Instant::now();
        let mut waited = Vec::new();
        while begun.elapsed().as_secs_f64() < seconds {
            waited.push(ask(&mut socket, &observation));
        }
        waited
    };
    let mut waited: Vec<Duration> = thread::scope(|scope| {
        let threads: Vec<_> = (0..clients).map(|_| scope.spawn(body)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("it was answered")).collect()
    });
    waited.sort_unstable();
    let at = |quantile: f64| {
        let rank = (quantile * waited.len() as f64).ceil() as usize;
        waited[rank.clamp(1, waited.len()) - 1].as_secs_f64() * 1e3
    };
    println!(
        "{{\"answers\": {}, \"per_second\": {:.2}, \"p50_ms\": {:.3}, \"p99_ms\": {:.3}, \"worst_ms\": {:.3}}}",
        waited.len(),
        waited.len() as f64 / seconds,
        at(0.5),
        at(0.99),
        at(1.0)
    );
}
