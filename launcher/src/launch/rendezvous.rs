//! How launchers meet: one of them holds the coordinator's listener, all of them ask the coordinator for
//! their place.
//!
//! The launcher binds the address itself and hands the open socket to the coordinator it starts: a port in
//! use is noticed at once, a free port needs no guessing, and workers may connect before the coordinator
//! accepts.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket},
    time::Duration,
};

use coxswain_identity::{Address, refusal};
use coxswain_proto::{VERSION, calls, limits, v1::JoinNodeRequest};
use socket2::SockRef;
use tonic::{Code, Status};

use super::{
    machine::LocalMachine,
    names,
    plan::{Hosting, Plan},
    worker_env::Place,
};
use crate::{
    clock,
    control::{Access, prompt},
    exit::{CliError, Exit},
};

/// Between two attempts to reach a coordinator that is not there yet.
pub const RETRY: Duration = Duration::from_millis(300);
/// How long a process may outlive a launcher that was killed: the kernel ends it at once, unless the machine
/// has much else to do.
pub const ORPHAN_PATIENCE: Duration = Duration::from_secs(2);

/// What this launcher is at the rendezvous.
#[derive(Debug)]
pub enum Role {
    /// It starts the coordinator on this socket.
    Host(TcpListener),
    /// It joins one.
    Guest,
}

/// Whether nobody but this machine can reach the coordinator.
pub fn stays_here(plan: &Plan) -> bool {
    let addresses = bind_addresses(&plan.endpoint.host, plan.endpoint.port);
    addresses.iter().all(|address| address.ip().to_canonical().is_loopback())
}

/// Binds the coordinator's address if this launcher is to start it.
pub fn take_role(plan: &Plan) -> Result<Role, CliError> {
    if plan.hosting == Hosting::No {
        return Ok(Role::Guest);
    }
    let endpoint = &plan.endpoint;
    let addresses = bind_addresses(&endpoint.host, endpoint.port);
    match bind(&addresses, plan.hosting) {
        Ok(listener) => Ok(Role::Host(listener)),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && plan.hosting == Hosting::IfFree => {
            Ok(Role::Guest)
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(CliError::new(
            Exit::Rendezvous,
            format!(
                "{endpoint}: the port is in use; choose another with launch.listen or --rdzv-endpoint, or port 0 for a free one"
            ),
        )),
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => Err(CliError::new(
            Exit::Rendezvous,
            format!(
                "{endpoint} is not an address of this machine, where the coordinator is to start; change it, \
                 or if a coordinator already runs there, give --rdzv-conf is_host=false"
            ),
        )),
        Err(error) => Err(CliError::new(Exit::Rendezvous, format!("cannot listen at {endpoint}: {error}"))),
    }
}

/// Where this launcher and its workers call at first. A launcher that `hosts` under a name which this machine
/// cannot resolve (of a load balancer, or of a service that has no entry yet) calls itself on loopback:
/// others may know the name.
pub fn first_address(plan: &Plan, hosts: bool, port: u16) -> Address {
    if hosts && names::look_up(&plan.endpoint.host, port).is_empty() {
        let here = Address::of(&Ipv4Addr::LOCALHOST.to_string(), port);
        return here.plaintext(plan.speech.plaintext);
    }
    plan.coordinator(port)
}

/// Listens for a run whose coordinator was on another machine: at the same port where that is free, which
/// firewalls may know.
pub fn listen_instead(plan: &Plan) -> io::Result<TcpListener> {
    let everywhere = [IpAddr::from(Ipv6Addr::UNSPECIFIED), Ipv4Addr::UNSPECIFIED.into()];
    let here = [IpAddr::from(Ipv4Addr::LOCALHOST)];
    let interfaces = if stays_here(plan) { &here[..] } else { &everywhere };
    let of_port = |port| interfaces.iter().map(move |ip| SocketAddr::new(*ip, port));
    let addresses: Vec<_> = [plan.endpoint.port, 0].into_iter().flat_map(of_port).collect();
    listen(&addresses[..])
}

/// Listens with room for as many callers that wait as a coordinator may have.
pub fn listen(addresses: impl ToSocketAddrs) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(addresses)?;
    // Linux takes another length of a socket that listens already.
    SockRef::from(&listener).listen(limits::BACKLOG)?;
    Ok(listener)
}

/// A launcher that was killed leaves its coordinator alive for a moment: its successor waits that long for
/// the port.
fn bind(addresses: &[SocketAddr], hosting: Hosting) -> io::Result<TcpListener> {
    let give_up = clock::now() + if hosting == Hosting::Yes { ORPHAN_PATIENCE } else { Duration::ZERO };
    loop {
        match listen(addresses) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && clock::now() < give_up => {
                std::thread::sleep(RETRY / 10);
            }
            bound => return bound,
        }
    }
}

/// What to bind, the first that can be. An address is bound as it is. A name is bound on all interfaces: it
/// may mean another one to this machine (Debian maps a machine's own name to 127.0.1.1) than to the machines
/// that call. So a name that cannot be resolved yet, as that of a new pod, is no obstacle here: callers wait
/// until it can be, this launcher among them.
fn bind_addresses(host: &str, port: u16) -> Vec<SocketAddr> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return vec![SocketAddr::new(ip, port)];
    }
    let found = names::look_up(bare, port);
    let first = found.iter().find(|address| address.is_ipv4()).or(found.first());
    let all_4 = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
    // Takes calls of both kinds where the machine has both.
    let all_6 = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
    match first {
        Some(address) if bare == "localhost" => vec![*address],
        Some(SocketAddr::V4(_)) => vec![all_4],
        Some(SocketAddr::V6(_)) => vec![all_6],
        None => vec![all_6, all_4],
    }
}

/// The address under which other machines reach this one's workers: as given, or the one that leads to the
/// coordinator.
pub fn local_addr(plan: &Plan, machine: &LocalMachine, port: u16) -> String {
    if let Some(given) = &plan.local_addr {
        return given.clone();
    }
    if plan.nnodes.max == 1 {
        return Ipv4Addr::LOCALHOST.to_string();
    }
    let bare = plan.endpoint.host.trim_start_matches('[').trim_end_matches(']');
    let towards = outgoing(bare, port);
    let coordinator_is_loopback =
        bare == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let visible = towards.filter(|ip| coordinator_is_loopback || !ip.is_loopback());
    let interface = || machine.addresses.iter().copied().find(|ip| ip.is_ipv4() && !ip.is_loopback());
    visible.or_else(interface).unwrap_or(Ipv4Addr::LOCALHOST.into()).to_string()
}

/// Our address on the route to `host`. "Connecting" a UDP socket sends nothing.
fn outgoing(host: &str, port: u16) -> Option<IpAddr> {
    let target = names::look_up(host, port).into_iter().next()?;
    let any: IpAddr = match target {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(target).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// How this launcher asks for its place.
pub fn request(plan: &Plan, host: &str, node_id: String) -> JoinNodeRequest {
    JoinNodeRequest {
        version: VERSION.to_owned(),
        run_id: plan.run_id.clone().unwrap_or_default(),
        node_id,
        host: host.to_owned(),
        local_world_size: plan.nproc_per_node,
        node_rank: plan.node_rank,
        returns: false,
        spec: None,
    }
}

/// Asks the coordinator for this launcher's place, and waits for a coordinator that is not there yet, and for
/// a place that another launcher may have left.
pub async fn join(access: &Access, plan: &Plan, request: &JoinNodeRequest) -> Result<Place, CliError> {
    let begin = clock::now();
    let mut told = false;
    loop {
        let status = match access.coordinator().join_node(prompt(request.clone())).await {
            Ok(answer) => return Ok(place(plan, answer.into_inner())),
            Err(status) => status,
        };
        let patience = patience_with(&status, plan);
        let explained = access.explain(&status).message.unwrap_or_default();
        if begin.elapsed() < patience {
            if !std::mem::replace(&mut told, true) {
                tracing::info!("waiting to join: {explained}");
            }
            tokio::time::sleep(RETRY).await;
            continue;
        }
        if status.code() == Code::InvalidArgument {
            return Err(access.explain(&status));
        }
        let waited = match patience {
            Duration::ZERO => String::new(),
            patience => format!(" after {} s", patience.as_secs()),
        };
        return Err(CliError::new(Exit::Rendezvous, format!("rendezvous failed{waited}: {explained}")));
    }
}

/// How long it helps to ask again after such an answer.
fn patience_with(status: &Status, plan: &Plan) -> Duration {
    match status.code() {
        // Who answers there, or we ourselves, cannot be trusted: that does not change by itself.
        _ if refusal(status).is_some() => Duration::ZERO,
        code if calls::may_answer_later(code) => plan.join_timeout,
        // Another launcher has the place, or all are taken; it may have died unseen.
        Code::AlreadyExists | Code::ResourceExhausted => plan.join_timeout.min(limits::PLACE_PATIENCE),
        _ => Duration::ZERO,
    }
}

fn place(plan: &Plan, answer: coxswain_proto::v1::JoinNodeResponse) -> Place {
    Place {
        node_rank: answer.node_rank,
        nnodes: plan.nnodes.max,
        first_rank: answer.first_rank,
        nproc: plan.nproc_per_node,
        world_size: answer.world_size,
        first_local_rank: plan.share.map_or(0, |share| share.local_rank),
        local_world_size: plan.share.map_or(plan.nproc_per_node, |share| share.of),
        run_id: answer.run_id,
        claim: answer.claim,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use coxswain_proto::run_spec::RunSpec;

    use super::*;
    use crate::launch::{flags::LaunchFlags, plan::Sources};

    fn plan(flags: LaunchFlags) -> Plan {
        let text = "{run: {name: a, output_dir: a}, model: {path: m}, data: {path: d, cameras: [c]}, \
                    train: {steps: 1, global_batch: 9, micro_batch: 1}}";
        let spec = RunSpec::from_yaml(text, "a", &[], crate::tasks::schemas()).unwrap();
        let machine = LocalMachine { host: "here".into(), cores: 1, addresses: vec![] };
        let gpus = || Err(coxswain_worker::device::NoGpus::NoDriver);
        let sources = Sources { flags: &flags, env: &|_| None, spec: &spec, machine: &machine, gpus: &gpus };
        Plan::resolve(&sources).unwrap()
    }

    fn two_nodes(endpoint: &str, node_rank: Option<&str>) -> Plan {
        plan(LaunchFlags {
            nnodes: Some("2".into()),
            rdzv_endpoint: Some(endpoint.into()),
            node_rank: node_rank.map(Into::into),
            ..LaunchFlags::default()
        })
    }

    #[test]
    fn the_first_on_a_machine_hosts_and_the_second_joins() {
        // Where the kernel puts no outgoing connection of another test: one of those could take the port
        // while it is free.
        let mut ports = (20_000..30_000).map(|port| format!("127.0.0.1:{port}"));
        let host = |endpoint: &String| take_role(&two_nodes(endpoint, None)).unwrap();
        let hosted = ports.find_map(|endpoint| match host(&endpoint) {
            Role::Host(listener) => Some((listener, endpoint)),
            Role::Guest => None,
        });
        let (_held, endpoint) = hosted.unwrap();
        assert!(matches!(take_role(&two_nodes(&endpoint, None)).unwrap(), Role::Guest));
        assert!(matches!(take_role(&two_nodes(&endpoint, Some("1"))).unwrap(), Role::Guest));
    }

    #[test]
    fn a_port_in_use_is_reported_when_the_host_is_fixed() {
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = held.local_addr().unwrap().to_string();
        let failed = take_role(&two_nodes(&endpoint, Some("0"))).unwrap_err();
        assert_eq!(failed.exit, Exit::Rendezvous);
        assert!(failed.message.unwrap().contains("the port is in use"));
    }

    #[test]
    fn all_workers_of_a_large_run_may_call_before_the_coordinator_accepts() {
        let Role::Host(listener) = take_role(&two_nodes("127.0.0.1:0", Some("0"))).unwrap() else {
            panic!("a guest")
        };
        let address = listener.local_addr().unwrap();
        // One for whom there is no room is answered after a second at the earliest.
        let call = |_| TcpStream::connect_timeout(&address, Duration::from_millis(500));
        let waiting: Vec<_> = (0..200).map_while(|caller| call(caller).ok()).collect();
        let most = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
        let most: usize = most.trim().parse().unwrap();
        assert!(waiting.len() >= most.min(200), "{} of 200 may wait", waiting.len());
    }

    #[test]
    fn a_name_that_is_not_known_yet_is_hosted_on_all_interfaces() {
        let plan = two_nodes("node-0.not-yet.invalid:0", Some("0"));
        assert!(!stays_here(&plan), "it will be reached from elsewhere");
        let Role::Host(listener) = take_role(&plan).unwrap() else { panic!("a guest") };
        assert!(listener.local_addr().unwrap().ip().is_unspecified());
        let (own, others) = (first_address(&plan, true, 7), first_address(&plan, false, 7));
        assert_eq!((own.port(), own.to_string().contains("127.0.0.1")), (Some(7), true), "{own}");
        assert!(others.to_string().contains("node-0.not-yet.invalid"), "{others}");
    }

    #[test]
    fn what_listens_on_loopback_stays_here_and_nothing_else_does() {
        let stays = |endpoint| stays_here(&two_nodes(endpoint, Some("0")));
        let here = ["127.0.0.1:29400", "127.0.0.2:29400", "[::1]:29400", "localhost:29400"];
        assert!(here.into_iter().all(stays));
        let elsewhere = ["0.0.0.0:29400", "[::]:29400", "192.0.2.1:29400", "node0.invalid:29400"];
        assert!(!elsewhere.into_iter().any(stays));
    }

    #[test]
    fn an_address_of_another_machine_cannot_be_hosted() {
        let failed = take_role(&two_nodes("192.0.2.1:29400", Some("0"))).unwrap_err();
        assert!(failed.message.unwrap().contains("is_host=false"));
    }

    #[test]
    fn workers_are_reached_where_the_coordinator_is_seen_from() {
        let machine = LocalMachine { host: "here".into(), cores: 1, addresses: vec![] };
        assert_eq!(local_addr(&plan(LaunchFlags::default()), &machine, 0), "127.0.0.1");
        assert_eq!(local_addr(&two_nodes("127.0.0.1:29400", None), &machine, 29400), "127.0.0.1");
        let fixed = LaunchFlags { local_addr: Some("127.0.0.2".into()), ..LaunchFlags::default() };
        assert_eq!(local_addr(&plan(fixed), &machine, 0), "127.0.0.2");
    }
}
