//! Puts an object and gets it back: `hello <master address>`.
#![allow(clippy::print_stdout, reason = "an example shows what it got")]

use mooncake_base::ObjectKey;
use mooncake_store_client::Store;

fn main() -> mooncake_base::Result<()> {
    let master = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".to_owned());
    let store = Store::connect(&master)?;
    let key = ObjectKey::new(*b"greeting")?;
    store.put(&key, b"Hello, Mooncake!")?;
    let value = store.get(&key)?.expect("it was put a moment ago");
    println!("{}", String::from_utf8_lossy(&value));
    store.close();
    Ok(())
}
