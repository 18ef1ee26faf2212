//! The process that listens at a TCP port of this host, for errors about occupied ports.

use std::{fs, path::Path};

/// Returns the process that listens at a port, as `name (pid 7)`; `None` if there is none, or if it
/// belongs to another user.
pub fn port_holder(port: u16) -> Option<String> {
    let inodes: Vec<String> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .flat_map(|table| listening_inodes(&table, port))
        .collect();
    let targets: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    if targets.is_empty() {
        return None;
    }
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes.map(|entry| entry.path()).find_map(|process| {
        let pid: u32 = process.file_name()?.to_str()?.parse().ok()?;
        let mut files = fs::read_dir(process.join("fd")).ok()?.flatten();
        let is_holder = |link: &Path| targets.iter().any(|target| link == Path::new(target));
        files.find(|file| fs::read_link(file.path()).is_ok_and(|link| is_holder(&link)))?;
        let line = fs::read(process.join("cmdline")).ok()?;
        Some(format!("{} (pid {pid})", program_of(&line)))
    })
}

/// Returns the inodes of the sockets that listen at a port, in a table of the kernel.
fn listening_inodes(table: &str, port: u16) -> Vec<String> {
    const LISTEN: &str = "0A";
    let rows = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (_, local_port) = fields.get(1)?.rsplit_once(':')?;
        let is_meant = u16::from_str_radix(local_port, 16) == Ok(port) && fields[3] == LISTEN;
        is_meant.then(|| fields.get(9).map(|inode| (*inode).to_owned()))?
    });
    rows.collect()
}

/// Returns the name of the program of a command line: of an interpreter that of its script or
/// module.
fn program_of(line: &[u8]) -> String {
    let words: Vec<_> = line.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    let name = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
    let program = words.first().map(|word| name(word)).unwrap_or_default();
    let mut shown = program;
    if shown.starts_with("python") {
        let script = words.iter().skip(1).find(|word| !word.starts_with('-') && !word.is_empty());
        shown = script.map_or(shown, |word| name(word));
    }
    // The words come from another process, and the text goes to terminals and logs.
    shown.chars().filter(|letter| !letter.is_control()).take(64).collect()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn own_listener_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let holder = port_holder(port).unwrap();
        assert!(holder.ends_with(&format!(" (pid {})", std::process::id())), "{holder}");
        drop(listener);
        assert_eq!(port_holder(port), None);
    }

    #[test]
    fn only_listening_sockets_of_the_port_count() {
        let table = "  sl  local_address rem_address   st tx rx tr tm retr uid timeout inode\n\
            0: 0100007F:1F90 00000000:0000 0A 0:0 0:0 0 0 0 4711 1 x 100\n\
            1: 0100007F:1F90 0100007F:ABCD 01 0:0 0:0 0 0 0 4712 1 x 100\n\
            2: 0100007F:1F91 00000000:0000 0A 0:0 0:0 0 0 0 4713 1 x 100\n";
        assert_eq!(listening_inodes(table, 0x1F90), ["4711"]);
        assert!(listening_inodes("", 1).is_empty());
    }

    #[test]
    fn scripts_are_named_instead_of_their_interpreter() {
        for (line, name) in [
            (&b"/usr/bin/redis-server\0*:6379\0"[..], "redis-server"),
            (b"/usr/bin/python3.11\0/usr/bin/mooncake_master\0--x\0", "mooncake_master"),
            (b"python\0-m\0mooncake.cli\0", "mooncake.cli"),
            (b"a\x1b[31m\0", "a[31m"),
            (b"", ""),
        ] {
            assert_eq!(program_of(line), name);
        }
    }
}
