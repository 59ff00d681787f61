"use strict";

// A plugin for `wrangler dev`: gives a Worker the runtime's own env.AI, connected to an Embergate gateway.
//
// The runtime knows no account and no token on this wire, so both are injected into every request. They come
// from the binding's options or from the environment (the three variables of Embergate's dev.env).

const PLUGIN = "embergate";

/** The bindings of a Worker that this plugin is to provide, by name. */
function ownBindings(options) {
  return Object.entries(options.config?.env ?? {}).filter(([, binding]) => binding?.dev?.plugin?.name === PLUGIN);
}

function serviceName(binding) {
  return `${PLUGIN}:${binding}`;
}

function setting(name, options, option, variable) {
  const value = options[option] ?? process.env[variable];
  if (!value) {
    throw new Error(`${name}: set ${variable} in the environment, or dev.options.${option} of the binding`);
  }
  return value;
}

/** Where a binding's requests go, and what is injected into them. Throws when something is missing or wrong. */
function upstream(name, binding) {
  const options = binding.dev.options ?? {};
  const url = new URL(setting(name, options, "url", "EMBERGATE_URL"));
  const headers = {
    authorization: `Bearer ${setting(name, options, "apiToken", "EMBERGATE_API_TOKEN")}`,
    "x-cf-account-id": setting(name, options, "accountId", "EMBERGATE_ACCOUNT_ID"),
  };
  const http = {
    injectRequestHeaders: Object.entries(headers).map(([key, value]) => ({ name: key, value })),
  };
  if (url.protocol === "http:") {
    return { address: url.port ? url.host : `${url.host}:80`, http };
  }
  if (url.protocol === "https:") {
    const address = url.port ? url.host : `${url.host}:443`;
    return { address, https: { options: http, tlsOptions: { trustBrowserCas: true }, certificateHost: url.hostname } };
  }
  throw new Error(`${name}: ${url.protocol} is not supported, only http: and https:`);
}

exports.plugins = {
  [PLUGIN]: {
    async getBindings(options) {
      return ownBindings(options).map(([name]) => ({
        name,
        wrapped: {
          moduleName: "cloudflare-internal:ai-api",
          innerBindings: [{ name: "fetcher", service: { name: serviceName(name) } }],
        },
      }));
    },
    getNodeBindings() {
      return {};
    },
    async getServices({ options }) {
      return ownBindings(options).map(([name, binding]) => ({
        name: serviceName(name),
        external: upstream(name, binding),
      }));
    },
  },
};
