# env.AI in a bare workerd, connected to an Embergate gateway. Fill in address, token and account (they are in
# .embergate/dev.env of a development installation), then: workerd serve workerd.capnp
using Workerd = import "/workerd/workerd.capnp";

const config :Workerd.Config = (
  services = [
    (name = "main", worker = (
      modules = [(name = "worker", esModule = embed "worker.js")],
      compatibilityDate = "2026-03-19",
      bindings = [
        (name = "AI", wrapped = (
          moduleName = "cloudflare-internal:ai-api",
          innerBindings = [(name = "fetcher", service = "embergate")]
        ))
      ]
    )),
    (name = "embergate", external = (
      address = "127.0.0.1:8787",
      http = (injectRequestHeaders = [
        (name = "authorization", value = "Bearer EMBERGATE_API_TOKEN"),
        (name = "x-cf-account-id", value = "EMBERGATE_ACCOUNT_ID")
      ])
    ))
  ],
  sockets = [(name = "http", address = "127.0.0.1:8080", http = (), service = "main")]
);
