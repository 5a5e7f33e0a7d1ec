//! An S3 server: `moto`'s, of Python. Nothing where that is not installed.

use std::{
    env,
    io::{BufRead, BufReader},
    net::SocketAddr,
    process::{Child, Command, Stdio},
};

/// A server of this machine, ended with the value.
pub struct Moto {
    child: Child,
    pub address: SocketAddr,
}

impl Moto {
    /// Starts `$COX_MOTO_SERVER`, or the `moto_server` of the path, on a free port; says that it skips where
    /// there is none.
    pub fn start() -> Option<Self> {
        let program = env::var("COX_MOTO_SERVER").unwrap_or_else(|_| "moto_server".into());
        let mut command = Command::new(program);
        command.args(["-H", "127.0.0.1", "-p", "0"]).stdout(Stdio::null()).stderr(Stdio::piped());
        let Ok(mut child) = command.spawn() else {
            println!(
                "skipped: no moto_server here; pip install 'moto[server]', or name it in COX_MOTO_SERVER"
            );
            return None;
        };
        let lines = BufReader::new(child.stderr.take().expect("it is piped")).lines().map_while(Result::ok);
        let mut said = lines.inspect(|line| println!("moto: {line}"));
        let port = said.find_map(|line| line.rsplit_once("http://127.0.0.1:")?.1.trim().parse().ok());
        // What it says later is read, so that it never waits to be.
        std::thread::spawn(move || said.for_each(drop));
        let port: u16 = port.expect("it says where it listens");
        Some(Self { child, address: ([127, 0, 0, 1], port).into() })
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
