//! This machine, as far as a launch depends on it.

use std::net::IpAddr;

use super::{inputs::process_env, names};

/// What this machine is called, where its own name says nothing: that of a container, say.
const NAME_VARIABLE: &str = "COX_HOST";

/// What a launch needs to know about the machine; plain data, so that tests can make one up.
#[derive(Clone, Debug)]
pub struct LocalMachine {
    /// Name.
    pub host: String,
    /// Cores this process may use.
    pub cores: usize,
    /// Addresses of its interfaces.
    pub addresses: Vec<IpAddr>,
}

impl LocalMachine {
    /// The machine this process runs on.
    pub fn this() -> Self {
        let own_name = || nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
        let host = process_env(NAME_VARIABLE).or_else(own_name);
        let interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
        let addresses = interfaces.filter_map(|interface| {
            let address = interface.address?;
            let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))
        });
        Self {
            host: host.unwrap_or_else(|| "localhost".to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            addresses: addresses.collect(),
        }
    }

    /// Whether `host` names this machine. A name that is neither known nor an address is looked up.
    pub fn is_local(&self, host: &str) -> bool {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let ours = |ip: IpAddr| ip.is_loopback() || ip.is_unspecified() || self.addresses.contains(&ip);
        if let Ok(ip) = bare.parse() {
            return ours(ip);
        }
        let label = |name: &str| name.split('.').next().unwrap_or_default().to_ascii_lowercase();
        bare == "localhost"
            || label(bare) == label(&self.host)
            || names::look_up(bare, 0).iter().any(|address| ours(address.ip()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_of_the_machine_are_local() {
        let machine = LocalMachine {
            host: "n4.cluster".into(),
            cores: 4,
            addresses: vec!["10.0.0.4".parse().unwrap(), "fd00::4".parse().unwrap()],
        };
        for local in ["localhost", "n4", "n4.cluster", "127.0.0.2", "10.0.0.4", "[fd00::4]", "::1", "0.0.0.0"]
        {
            assert!(machine.is_local(local), "{local}");
        }
        for remote in ["10.0.0.5", "[fd00::5]", "8.8.8.8"] {
            assert!(!machine.is_local(remote), "{remote}");
        }
    }

    #[test]
    fn this_machine_has_a_name_a_core_and_a_loopback() {
        let machine = LocalMachine::this();
        assert!(!machine.host.is_empty());
        assert!(machine.cores >= 1);
        assert!(machine.addresses.iter().any(IpAddr::is_loopback));
    }
}
